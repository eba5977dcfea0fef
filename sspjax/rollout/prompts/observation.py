"""Tool results as forced turns, within a token budget.

After `</search>` the tool's text follows directly, and after it the policy goes on: no message
markup in between. Whatever the passages hold and however long they are, the closing tag is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sspjax.rollout.prompts.compose import document_text
from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.types import Document, Turn, noun

_LEAST = 8
"""Tokens of its text below which a passage that has to be cut is not worth showing."""


@noun
class _Entry:
    """One document's tokens; `least` of them must be shown for it to count as shown."""

    document: Document
    token_ids: tuple[int, ...]
    least: int


def observation_turn(
    prompt_set: PromptSet,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    budget: int,
    document_tokens: int,
) -> Turn:
    """A forced turn of at most `budget` tokens that shows `documents`, best first.

    A document (heading included) is cut to `document_tokens`. Where all together are too long, the
    longest are cut to a common length, and the last are left out when too little would remain of
    each. `Turn.documents` are those shown. Raises ValueError for a budget below
    `smallest_observation`.
    """
    floor = smallest_observation(prompt_set, tokenizer)
    if budget < floor:
        raise ValueError(
            f"expected a budget of at least {floor} tokens for a tool's text (prompt set "
            f"{prompt_set.name}), got {budget}: raise observation_tokens, or end the response first"
        )
    opening, closing = tokenizer.encode(prompt_set.opening), tokenizer.encode(prompt_set.closing)
    separator = tokenizer.encode(prompt_set.separator)
    entries = [
        _entry(prompt_set, tokenizer, rank, document, document_tokens)
        for rank, document in enumerate(documents, 1)
    ]
    room = budget - len(opening) - len(closing)
    shown, share = _shown(entries, room, len(separator))

    ids = [*opening]
    if not documents:
        ids += tokenizer.encode(prompt_set.nothing)
    for place, entry in enumerate(shown):
        ids += separator if place else []
        ids += _cut(tokenizer, entry.token_ids, share)
    ids += closing
    return Turn(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        sampled=False,
        text=tokenizer.decode(ids),
        documents=tuple(entry.document for entry in shown),
    )


def smallest_observation(prompt_set: PromptSet, tokenizer: Tokenizer) -> int:
    """Tokens of an observation without passages: with fewer left, a response is over."""
    parts = (prompt_set.opening, prompt_set.nothing, prompt_set.closing)
    return sum(len(tokenizer.encode(part)) for part in parts)


def _entry(
    prompt_set: PromptSet, tokenizer: Tokenizer, rank: int, document: Document, limit: int
) -> _Entry:
    heading, passage = document_text(prompt_set, rank, document)
    # A title cannot crowd out the text it stands over.
    head = _cut(tokenizer, tokenizer.encode(heading), limit // 2)
    ids = _cut(tokenizer, (*head, *tokenizer.encode(passage)), limit)
    return _Entry(document=document, token_ids=ids, least=min(len(ids), len(head) + _LEAST))


def _shown(entries: Sequence[_Entry], room: int, separator: int) -> tuple[Sequence[_Entry], int]:
    """The first entries that fit into `room` tokens, and the length each is cut to."""
    for count in range(len(entries), 0, -1):
        kept = entries[:count]
        share = _fair_share([len(e.token_ids) for e in kept], room - separator * (count - 1))
        if share >= max(entry.least for entry in kept):
            return kept, share
    return (), 0


def _fair_share(lengths: Sequence[int], room: int) -> int:
    """Largest c with sum(min(length, c)) <= room: short ones are whole, long ones equal."""
    share = 0
    for done, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - done)
        if length > share:
            return share
        room -= length
    return max(lengths, default=share)


def _cut(tokenizer: Tokenizer, ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """The first `limit` ids, less those of a character that the cut would split."""
    kept = tuple(ids[:limit])
    if len(kept) < len(ids):
        while kept and tokenizer.decode(kept[-4:]).endswith("\ufffd"):
            kept = kept[:-1]
    return kept
