"""Control tokens around messages. This is the only place that puts one into a sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.types import noun


@noun
class Layout:
    """How messages become one sequence. A tool's text and the next reply follow without markup."""

    controls: tuple[str, ...]
    """Control tokens that the texts below name."""
    before: str
    """Before a message's content. Field: author."""
    after: str
    reply: str
    """After the last message: what the policy continues."""


LAYOUTS: Mapping[str, Layout] = {
    # SSP and its released checkpoints: no end token and no line break between messages.
    "chatml": Layout(
        controls=("<|im_start|>",),
        before="<|im_start|>{author}\n",
        after="",
        reply="<|im_start|>assistant\n",
    ),
    "llama3": Layout(
        controls=("<|start_header_id|>", "<|end_header_id|>"),
        before="<|start_header_id|>{author}<|end_header_id|>\n\n",
        after="",
        reply="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "plain": Layout(controls=(), before="", after="\n\n", reply=""),
    "bare": Layout(controls=(), before="", after="", reply=""),
}


def prompt_ids(
    prompt_set: PromptSet, tokenizer: Tokenizer, messages: Sequence[tuple[str, Sequence[str]]]
) -> np.ndarray:
    """i32[prompt length] of (author, pieces of content).

    Contents are encoded piece by piece, so that a passage costs nothing the second time. What the
    vocabulary itself puts before a text comes first.
    """
    layout = _layout(prompt_set, tokenizer)
    ids = [*tokenizer.opening_ids]
    for author, pieces in messages:
        ids += _markup(layout, tokenizer, layout.before.format(author=author))
        for piece in pieces:
            ids += tokenizer.encode(piece)
        ids += _markup(layout, tokenizer, layout.after)
    return np.asarray(ids + _markup(layout, tokenizer, layout.reply), np.int32)


def _layout(prompt_set: PromptSet, tokenizer: Tokenizer) -> Layout:
    for name in prompt_set.layouts:
        if all(control in tokenizer.specials for control in LAYOUTS[name].controls):
            return LAYOUTS[name]
    raise ValueError(
        f"expected a vocabulary with the control tokens of one of {', '.join(prompt_set.layouts)} "
        f"(prompt set {prompt_set.name}), got {', '.join(tokenizer.specials) or 'none'}: "
        "choose another model.prompts"
    )


def _markup(layout: Layout, tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of the layout's own text, the one text in which control tokens are meant."""
    if not layout.controls:
        return tokenizer.encode(text)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, layout.controls))})", text):
        ids += [tokenizer.special(part)] if part in layout.controls else tokenizer.encode(part)
    return ids
