"""What the proposer starts from, and in which order.

A run remembers one number: how many seeds were taken since its start. Everything else, the order
of every epoch included, follows from the run's seed, so a resumed run meets the same answers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from sspjax.types import Seed, noun


@noun
class SeedSource:
    """An endless, reproducible sequence: the pool in a new order every epoch."""

    pool: tuple[Seed, ...]
    seed: int
    """The run's seed."""

    def take(self, cursor: int, count: int) -> tuple[tuple[Seed, ...], int]:
        """The next `count` seeds and the new cursor; a batch may straddle epochs.

        `cursor` counts seeds over all epochs. Every returned seed carries its place in the sequence
        in its uid, so the same seed taken twice, even in one step, names two groups.
        """
        size = len(self.pool)
        places = range(cursor, cursor + count)
        orders = {epoch: self._order(epoch) for epoch in {p // size for p in places}}
        drawn = [(p, self.pool[orders[p // size][p % size]]) for p in places]
        return tuple(dataclasses.replace(s, uid=f"{s.uid}@{p}") for p, s in drawn), cursor + count

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.pool)))
        random.Random(f"{self.seed}/seeds/{epoch}").shuffle(order)
        return order


def answers(pool: Sequence[Seed], seed: int) -> SeedSource:
    """Known answers to work back from (SSP, SESA). Raises ValueError on a seed without one."""
    if not pool:
        raise ValueError("seeds: expected at least one answer, got none; check seeds.path")
    for s in pool:
        if s.answer is None or not s.answer.strip():
            raise ValueError(
                f"seed {s.uid}: expected an answer, got {s.answer!r}; "
                "seeds.kind=answers needs one in every row"
            )
    return SeedSource(pool=tuple(pool), seed=seed)


SEED_SOURCES: dict[str, Callable[[Sequence[Seed], int], SeedSource]] = {"answers": answers}
"""By `seeds.kind`."""
