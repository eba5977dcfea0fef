"""Text from outside must not speak with our tags."""

from __future__ import annotations

_OPENING, _CLOSING = "\u2039", "\u203a"

_BRACKETS = str.maketrans(
    {
        "<": _OPENING,
        "\ufe64": _OPENING,  # small less-than sign
        "\uff1c": _OPENING,  # full-width less-than sign
        ">": _CLOSING,
        "\ufe65": _CLOSING,
        "\uff1e": _CLOSING,
    }
)
"""Every character that is an angle bracket, or becomes one under Unicode NFKC."""


def neutralise(text: str) -> str:
    """`text` with every angle bracket replaced by a single quotation mark of the same shape.

    Passages, titles, questions, answers and skills pass through here before they enter a prompt or
    a tool turn. Without brackets there is no tag, in whatever case, with blanks or invisible
    characters inside, cut off at either end or spread over neighbouring passages; a search for tags
    would have to think of each. Control tokens lose their brackets too, though `Tokenizer.encode`
    alone already keeps them out.
    """
    return text.translate(_BRACKETS)
