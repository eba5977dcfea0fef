"""Prompts for a model of half a million parameters that has never read an instruction.

They are marks more than sentences: each token costs attention and time. The small vocabulary is
trained on text in which a space comes before every word and every punctuation mark, so contents are
put after a space wherever they stand, and a word is one token in all places.

The reader's question comes before the passages, which look as they do after a search: in a causal
model of few layers a passage can only be read for what is asked where the question is known, and so
reading and solving are one skill.
"""

from __future__ import annotations

from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.types import Message

_OPENING, _CLOSING = "\n<information>", "\n</information>\n"

TINY = PromptSet(
    name="tiny",
    layouts=("bare",),
    one_line=True,
    proposer=(Message(author="user", content=" ask {hops} : {answer}\n"),),
    solver=(Message(author="user", content="{skills} question : {question}\n"),),
    reader=(
        Message(
            author="user", content=" question : {question}" + _OPENING + "{documents}" + _CLOSING
        ),
    ),
    skills="{skills}",
    skill=" note : {skill}\n",
    heading="",
    passage=" {text}",
    separator="\n",
    nothing=" nothing",
    opening=_OPENING,
    closing=_CLOSING,
    act="<{tag}> {argument} </{tag}>",
)
"""Passages of the mini-encyclopaedia start with their title, so no heading is shown."""
