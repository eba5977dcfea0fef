"""Invented names: unique, pronounceable, and from one list for all small worlds."""

import random
import re

from sspjax.data import grammar
from sspjax.data.names import POOLS, draw_names, shared_words


def test_no_word_is_in_two_pools_however_large_they_grow():
    words = [w.lower() for pools in POOLS.values() for p in pools for w in p.words(20_000)]
    assert len(words) > 130_000
    assert len(set(words)) == len(words)


def test_a_larger_pool_begins_with_the_smaller_one():
    pool = POOLS["person"][0]
    assert pool.words(500)[: pool.base] == pool.words(pool.base)


def test_invented_words_alternate_consonants_and_vowels_in_their_stem():
    pool = POOLS["city"][0]
    for word in pool.words(1000):
        stem = next(word[: -len(e)] for e in pool.endings if word.endswith(e))
        assert re.fullmatch(r"([bdfgklmnprstvz][aeiou])+", stem.lower())


def test_names_are_unique_beyond_the_shared_words():
    for kind, pools in POOLS.items():
        names = draw_names(kind, 5_000, random.Random(0))
        assert len(set(names)) == 5_000
        assert {len(name.split()) for name in names} == {len(pools)}


def test_names_depend_on_the_stream_alone():
    assert draw_names("film", 50, random.Random(1)) == draw_names("film", 50, random.Random(1))
    assert draw_names("film", 50, random.Random(1)) != draw_names("film", 50, random.Random(2))


def test_no_name_word_is_a_word_of_the_language():
    """Otherwise a template could be read into a name."""
    templates = [
        text
        for worded in grammar.WORDINGS.values()
        for wording in worded.values()
        for text in (*wording.questions, *wording.phrases)
    ]
    invented = {w.lower() for pools in POOLS.values() for p in pools for w in p.words(5_000)}
    closed = {w.lower() for pools in POOLS.values() for p in pools for w in p.closed}
    language = {word for text in templates for word in text.split()}
    assert not (invented - closed) & language
    assert len(shared_words()) <= 600
