"""Where a sampled turn ends: closing tags found over token ids, on the device.

A tag has no token of its own: `</search>` may come as `</`, `search`, `>` or hidden inside longer
tokens, and the last of them may carry text after the tag. So tags are found over bytes, by an
Aho-Corasick automaton, whose runs over whole tokens are tabulated once per vocabulary: the decode
loop reads `table[state, token]` and asks `completed[state]`.

The token that completes a tag stays whole; of two tags inside one token the first counts. A
completed tag need not end the turn (a solver may write `</question>`), so the automaton goes on
from what follows the tag: a state whose `completed` is set says only that the last token did it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sspjax.types import Act

STOP_TAGS: Mapping[Act, str] = {
    act: f"</{act.value}>" for act in (Act.SEARCH, Act.OPEN, Act.FIND, Act.ANSWER, Act.QUESTION)
}
"""Closing tag of every act; its position here is the tag's number and its bit in `stop_bits`."""

START = 0
"""State before the first token of a turn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Automaton:
    """Next state and completed tag for whole tokens. A turn starts in state `START`."""

    table: np.ndarray
    """int16[states, V] (int32 where there are too many states): the state after a token. Tokens
    without bytes (control tokens) lead to `START`."""
    completed: np.ndarray
    """int32[states]: number of the tag that the last token completed, -1 where it did not."""


def stop_bits(acts: Iterable[Act]) -> int:
    """Bit mask of the tags that end a turn in which `acts` are allowed (`SlotState.stops`)."""
    numbers = {act: number for number, act in enumerate(STOP_TAGS)}
    return sum(1 << numbers[act] for act in set(acts))


def build_automaton(
    token_bytes: Sequence[bytes],
    tags: Sequence[str] = tuple(STOP_TAGS.values()),
    *,
    vocab_size: int | None = None,
) -> Automaton:
    """Automaton over whole tokens that finds `tags`, in any tokenisation.

    `token_bytes[i]` is what id i stands for. `vocab_size` widens the table to the rows of a model's
    embedding (padding ids behave like control tokens); default: `len(token_bytes)`.
    Raises ValueError for an empty tag, for one inside another (which ended first would then depend
    on the text before), and for a `vocab_size` below the vocabulary.
    """
    width = len(token_bytes) if vocab_size is None else vocab_size
    _check(tags, len(token_bytes), width)
    step, found = _byte_automaton([tag.encode() for tag in tags])
    state, first = _run(step, found, [*token_bytes, *[b""] * (width - len(token_bytes))])

    # A token that completes a tag leads to a state of its own, one for each (tag, state after the
    # token's remaining bytes): it continues like the latter and reports the former.
    states = len(step)
    completing = first >= 0
    pairs, number = np.unique(
        first[completing].astype(np.int64) * states + state[completing], return_inverse=True
    )
    state[completing] = states + number
    table = np.concatenate([state, state[pairs % states]])
    completed = np.concatenate([np.full(states, -1), pairs // states])
    small = len(table) <= np.iinfo(np.int16).max
    return Automaton(
        table=table.astype(np.int16 if small else np.int32), completed=completed.astype(np.int32)
    )


def _check(tags: Sequence[str], known: int, width: int) -> None:
    inside = [a in b for i, a in enumerate(tags) for j, b in enumerate(tags) if i != j]
    if "" in tags or any(inside):
        raise ValueError(
            f"expected tags that are not empty and not part of each other, got {list(tags)}"
        )
    if width < known:
        raise ValueError(f"expected vocab_size of at least {known}, the vocabulary's, got {width}")


def _byte_automaton(tags: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Aho-Corasick: next state int32[states, 256], and int32[states] number of the tag that ends
    here or -1 (Aho and Corasick 1975, algorithms 2 to 4).
    """
    children: list[dict[int, int]] = [{}]
    found = [-1]
    for number, tag in enumerate(tags):
        node = START
        for byte in tag:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                found.append(-1)
            node = children[node][byte]
        found[node] = number

    step = np.zeros((len(children), 256), np.int32)
    waiting = collections.deque([(START, START)])
    while waiting:
        node, failure = waiting.popleft()
        # What is no child continues as after the longest proper suffix, whose row is complete:
        # it is shorter, and rows are filled in order of length.
        step[node] = step[failure] if node != START else START
        waiting.extend((child, int(step[node, byte])) for byte, child in children[node].items())
        for byte, child in children[node].items():
            step[node, byte] = child
    return step, np.asarray(found, np.int32)


def _run(
    step: np.ndarray, found: np.ndarray, token_bytes: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Every state through every token: the state after it and the first tag completed in it.

    Both int32[states, V], the second -1 where there is none. One byte of all tokens at a time, the
    tokens sorted by length so that those still running are a prefix.
    """
    lengths = np.asarray([len(b) for b in token_bytes], np.int32)
    order = np.argsort(-lengths, kind="stable")
    running = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0) + 1), "right")
    tokens = [token_bytes[i] for i in order]

    state = np.tile(np.arange(len(step), dtype=np.int32)[:, None], len(tokens))
    first = np.full(state.shape, -1, np.int32)
    for position, count in enumerate(running):
        byte = np.fromiter((t[position] for t in tokens[:count]), np.int32, count)
        after = step[state[:, :count], byte]
        tag = found[after]
        first[:, :count] = np.where(first[:, :count] < 0, tag, first[:, :count])
        state[:, :count] = after
    state[:, lengths[order] == 0] = START

    back = np.argsort(order, kind="stable")
    return state[:, back], first[:, back]
