"""Invented names of one or two words, each from a pool that belongs to the kind of the name.

Worlds of up to `SMALL_WORLD` entities share one fixed list of words, so that a tokenizer trained on
any of them knows every word of the others; they differ in how the words are combined. Larger worlds
need more names than that list can give and add longer words to it, always the same ones.
"""

from __future__ import annotations

import math
import random

from sspjax.types import noun

SMALL_WORLD = 3000
"""Entities up to which no word is added to the shared list."""

_HEADROOM = 1.1
"""Combinations there must be for each name drawn: a world never uses up its pools."""

_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
_STRIDE = 29
"""Coprime to the number of syllables: neighbours in a pool do not look alike."""


@noun
class Pool:
    """Words of one type: `base` of them shared by all small worlds, the rest made on demand."""

    base: int
    endings: tuple[str, ...] = ()
    """What invented words of this type end in; no two pools share an ending."""
    first_syllable: int = 0
    closed: tuple[str, ...] = ()
    """Plain words instead of invented ones; such a pool never grows."""

    def words(self, count: int) -> list[str]:
        """The first `count` words: `base` short ones, then longer and longer ones."""
        return list(self.closed) or [self._word(i) for i in range(count)]

    def _word(self, index: int) -> str:
        size = len(_SYLLABLES)
        ending = self.endings[index % len(self.endings)]
        if index < self.base:
            return (_SYLLABLES[(self.first_syllable + index * _STRIDE) % size] + ending).title()
        # Numbers from `size` on have at least two digits, hence two syllables before the ending:
        # no long word is a short one.
        number = size + (index - self.base) // len(self.endings)
        stem = ""
        while number:
            number, digit = divmod(number, size)
            stem += _SYLLABLES[digit]
        return (stem + ending).title()


CITY_WORDS = ("Harbor", "Falls", "Bay", "Hill", "Ford", "Field", "Port", "Vale", "Gate", "Cross")
CITY_WORDS += ("Heath", "Bridge")
COMPANY_WORDS = ("Motors", "Foods", "Steel", "Books", "Labs", "Lines", "Mills", "Tools", "Glass")
COMPANY_WORDS += ("Paper", "Radio", "Bank")

POOLS: dict[str, tuple[Pool, ...]] = {
    "person": (
        Pool(base=60, endings=("ra", "len", "mi", "so"), first_syllable=3),
        Pool(base=80, endings=("rvik", "ndal", "stor", "lby"), first_syllable=11),
    ),
    "city": (
        Pool(base=80, endings=("lmar", "ndor", "vash"), first_syllable=23),
        Pool(base=len(CITY_WORDS), closed=CITY_WORDS),
    ),
    "company": (
        Pool(base=80, endings=("tron", "gard", "plax"), first_syllable=31),
        Pool(base=len(COMPANY_WORDS), closed=COMPANY_WORDS),
    ),
    "film": (
        Pool(base=60, endings=("dane", "zene"), first_syllable=42),
        Pool(base=60, endings=("thel", "rune"), first_syllable=55),
    ),
    "country": (Pool(base=60, endings=("via", "stan", "lund"), first_syllable=60),),
}
"""Kind to the pools its names, and its aliases, are put together from."""


def draw_names(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different names of a kind, in random order."""
    pools = POOLS[kind]
    capacity = math.prod(pool.base for pool in pools)
    growing = sum(not pool.closed for pool in pools)
    growth = max(1.0, count * _HEADROOM / capacity) ** (1 / growing)
    columns = [pool.words(math.ceil(pool.base * growth)) for pool in pools]
    names = []
    for number in rng.sample(range(math.prod(map(len, columns))), count):
        words = []
        for column in columns:
            number, index = divmod(number, len(column))
            words.append(column[index])
        names.append(" ".join(words))
    return names


def shared_words() -> list[str]:
    """Every name word that a world of up to `SMALL_WORLD` entities may use."""
    return [word for pools in POOLS.values() for pool in pools for word in pool.words(pool.base)]
