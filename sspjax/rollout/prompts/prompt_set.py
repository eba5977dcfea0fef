"""What a set of prompt texts consists of."""

from __future__ import annotations

from sspjax.types import Message, noun


@noun
class PromptSet:
    """Texts of all roles and of tool results. Fields in braces are filled by `compose`.

    A template is a tuple of messages; the last one is what the policy replies to.
    """

    name: str
    layouts: tuple[str, ...]
    """Names in `layout.LAYOUTS`: the first one whose control tokens the vocabulary has is used."""
    one_line: bool
    """Squeeze blanks and line breaks inside contents to single spaces (else only strip them)."""
    proposer: tuple[Message, ...]
    """Fields: answer, hops."""
    solver: tuple[Message, ...]
    """Fields: question, skills (empty where there are none)."""
    reader: tuple[Message, ...]
    """Fields: question, documents."""
    skills: str
    """Around all skills. Field: skills."""
    skill: str
    """One skill. Field: skill."""
    heading: str
    """Before a passage. Fields: rank (from 1), title."""
    passage: str
    """Field: text."""
    separator: str
    """Between passages."""
    nothing: str
    """In the place of passages when there are none."""
    opening: str
    """Before the passages of a tool turn."""
    closing: str
    """After them."""
    act: str
    """How an act is written. Fields: tag, argument."""

    def content(self, text: str) -> str:
        """Blanks around `text` removed, or inside it squeezed, as the set wants contents."""
        return " ".join(text.split()) if self.one_line else text.strip()
