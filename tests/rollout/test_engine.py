"""The engine by itself: caches, slots, budgets, tags and programs."""

import numpy as np
import pytest
from game_parts import (
    LENGTH,
    PROMPT_LENGTH,
    engine_of,
    make_engine,
    model,
    reciter,
    reciting_engine,
    scripts,
    token,
    tokenizer,
    weights,
    whole_context,
)

from sspjax.config import ConfigError
from sspjax.metrics import CompileCounter
from sspjax.rollout.engine import EngineCounts, Sampling, stream_key
from sspjax.rollout.stop import stop_bits
from sspjax.types import Act

GREEDY = Sampling(temperature=0.0)
WARM, HOT = Sampling(temperature=0.8), Sampling(temperature=2.0)
SEARCH = stop_bits([Act.SEARCH])
SEARCH_OR_ANSWER = stop_bits([Act.SEARCH, Act.ANSWER])
EOS = tokenizer().eos_id


@pytest.fixture
def engine():
    """A reciting engine as if it were new."""
    made = reciting_engine()
    made.clear()
    made.counts = EngineCounts()
    return made


@pytest.fixture
def speaking():
    """An engine of the decoder: 16 slots, calls of 4 x 8 forced and 3 sampled tokens."""
    made = engine_of(16)
    made.clear()
    made.counts = EngineCounts()
    return made


def begin(engine, table, lines, *, stops=SEARCH_OR_ANSWER, budget=32, sampling=GREEDY) -> None:
    """Starts `lines` (slot to prompt) and their first turns."""
    prompts = {slot: np.asarray(ids, np.int32) for slot, ids in lines.items()}
    engine.prefill(table, prompts)
    for slot, ids in prompts.items():
        engine.start(slot, ids, stream_key(0, slot), sampling)
        engine.begin_turn(slot, stops, budget)


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text)


# Against the whole context ------------------------------------------------------------------------


def test_extended_cache_gives_the_logits_of_the_whole_context(speaking):
    """Prompt, sampled turn, forced tokens, sampled turn, in slots that started apart."""
    rng = np.random.default_rng(0)
    said = {slot: rng.integers(3, 250, n).astype(np.int32) for slot, n in ((0, 1), (3, 9), (5, 40))}
    measured = []
    begin(speaking, weights(), said, stops=0, budget=7, sampling=WARM)
    for forced in (21, 1, 8):
        while speaking.active.any():
            out = speaking.decode(weights(), 1.0)
            for row, slot in enumerate(out.slots.tolist()):
                start, count = len(said[slot]), out.count[row]
                said[slot] = np.append(said[slot], out.tokens[row, :count])
                measured += [(slot, start + i, out.logprobs[row, i]) for i in range(count)]
        news = {slot: rng.integers(3, 250, forced).astype(np.int32) for slot in said}
        speaking.append(weights(), news)
        for slot, ids in news.items():
            said[slot] = np.append(said[slot], ids)
            speaking.begin_turn(slot, 0, 5)
    assert len(measured) == 3 * (7 + 5 + 5)
    for slot, place, logprob in measured:
        logits = whole_context()(np.resize(said[slot], 256), place)
        scaled = np.asarray(logits, np.float64) / 0.8
        expected = scaled[said[slot][place]] - np.logaddexp.reduce(scaled)
        assert abs(logprob - expected) < 1e-4


def test_a_copied_prompt_is_the_prefilled_one_bit_for_bit(speaking):
    prompt = np.random.default_rng(1).integers(3, 250, PROMPT_LENGTH).astype(np.int32)
    others = [slot for slot in range(16) if slot != 4]
    speaking.prefill(weights(), {4: prompt})
    speaking.copy_prompts([(4, slot) for slot in others], [PROMPT_LENGTH] * 15)
    for slot in range(16):
        speaking.start(slot, prompt, stream_key("same"), WARM)
        speaking.begin_turn(slot, 0, 9)
    for _ in range(3):
        out = speaking.decode(weights(), 1.0)
        assert out.tokens.shape == (16, 3)
        assert all(np.array_equal(out.tokens[0], row) for row in out.tokens)
        assert all(np.array_equal(out.logprobs[0], row) for row in out.logprobs)
    assert speaking.counts.prefilled == PROMPT_LENGTH - 1
    assert speaking.counts.copied == 15 * (PROMPT_LENGTH - 1)


# Slots --------------------------------------------------------------------------------------------


def test_bits_do_not_depend_on_the_slot(engine):
    """The reciter's logits hold an exponential over the slots: rows left over of whole vectors
    would round differently."""
    table = scripts([[0, *range(40, 80)]])
    for length in range(1, 20):
        begin(engine, table, {slot: [0, *range(3, 3 + length)] for slot in range(13)}, stops=0)
        out = engine.decode(table, 1.0)
        assert out.slots.tolist() == list(range(13)) and out.tokens.shape == (13, 16)
        assert len(set(out.logprobs[0].tolist())) > 8
        assert all(np.array_equal(out.logprobs[0], row) for row in out.logprobs)
        engine.clear()


def test_decode_returns_when_enough_slots_wait(engine):
    """Turns of 1, 2, ... 8 tokens in eight slots."""
    table = scripts([[0, *range(40, 80)]])
    for return_when, steps in ((0.01, 1), (0.25, 2), (0.26, 3), (0.5, 4), (1.0, 8)):
        engine.clear()
        begin(engine, table, {slot: [0] for slot in range(2, 10)}, stops=0)
        for slot in range(2, 10):
            engine.begin_turn(slot, 0, slot - 1)
        out = engine.decode(table, return_when)
        assert out.tokens.shape == (8, steps) == out.logprobs.shape
        assert out.slots.tolist() == list(range(2, 10))
        assert out.count.tolist() == [min(n, steps) for n in range(1, 9)]
        assert out.stopped.tolist() == [n <= steps for n in range(1, 9)]
        for row, count in enumerate(out.count):
            assert out.tokens[row].tolist() == [*range(40, 40 + count), *[0] * (steps - count)]
        # The next call goes on where this one ended; shares are those of the slots still active.
        assert engine.active.sum() == 8 - steps
        if steps < 8:
            more = engine.decode(table, 1.0)
            assert more.slots.tolist() == list(range(2 + steps, 10))
            assert more.tokens[-1].tolist() == list(range(40 + steps, 48))


def test_decode_returns_after_decode_tokens_at_the_latest(engine):
    table = scripts([[0, *range(40, 80)]])
    begin(engine, table, {3: [0]}, stops=0, budget=40)
    said = []
    for steps in (16, 16, 8):
        out = engine.decode(table, 0.01)
        assert out.count.tolist() == [steps] and out.stopped.tolist() == [steps == 8]
        said += out.tokens[0].tolist()
    assert said == list(range(40, 80))
    assert engine.counts.generated == 40 and engine.counts.slot_steps == 40 * 13
    assert not engine.active.any()


def test_work_is_counted_token_by_token(engine):
    fed = []
    extend = engine._extend

    def watched(table, cache, tokens, slots, start, count):
        fed.append(int(count.sum()))
        assert tokens.shape == (4, 8) and (count <= 8).all()
        busy = slots[count > 0].tolist()
        assert len(set(busy)) == len(busy), "a slot may appear once in a call"
        return extend(table, cache, tokens, slots, start, count)

    engine._extend = watched
    table = scripts([[0, *range(40, 80)]])
    prompts = {slot: [0, *range(3, 3 + slot)] for slot in range(13)}
    begin(engine, table, prompts, stops=0, budget=3)
    engine.decode(table, 1.0)
    engine.append(table, {slot: np.arange(5, 6 + slot) for slot in range(13)})
    engine._extend = extend
    assert engine.counts.prefilled == sum(range(13)) + sum(range(1, 14)) == sum(fed)
    assert engine.counts.generated == 39 and engine.counts.copied == 0
    # What the cache holds is what was said: prompt, turn and observation, the last token pending.
    held = np.asarray(engine._cache.keys)[0, :, :, 0, 0]
    for slot, prompt in prompts.items():
        context = [*prompt, *range(40 + slot, 43 + slot), *range(5, 6 + slot)][:-1]
        assert held[slot, : len(context)].tolist() == context


def test_a_slot_forgets_what_was_in_it(engine):
    table = scripts([[0, *range(40, 80)], [1, *range(100, 140)]])
    begin(engine, table, {0: [0, 9, 9, 9], 1: [1]}, stops=0, budget=12)
    engine.decode(table, 1.0)
    begin(engine, table, {0: [1], 1: [0]}, stops=0, budget=12)
    again = engine.decode(table, 1.0)
    engine.clear()
    begin(engine, table, {5: [1], 6: [0]}, stops=0, budget=12)
    fresh = engine.decode(table, 1.0)
    assert np.array_equal(again.tokens, fresh.tokens)
    assert np.array_equal(again.logprobs, fresh.logprobs)


def test_clear_stops_every_slot(engine):
    table = scripts([[0, *range(40, 80)]])
    begin(engine, table, {0: [0], 7: [0]})
    assert engine.active.sum() == 2
    engine.clear()
    assert not engine.active.any() and len(engine.decode(table, 0.5).slots) == 0


# Tags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [">", ">."])
def test_the_token_that_completes_a_tag_ends_the_turn_and_stays_whole(engine, last):
    said = [token("<"), token("search"), token(">"), token(" name"), token(" </"), token("search")]
    table = scripts([[0, *said, token(last), 77, 78]])
    begin(engine, table, {2: [0]})
    out = engine.decode(table, 1.0)
    assert out.tokens[0, : out.count[0]].tolist() == [*said, token(last)] and out.stopped[0]


def test_only_tags_of_the_slot_end_its_turn(engine):
    said = [*encoded(" </question>"), *encoded(" </answer>"), *encoded(" </search>"), 77]
    table = scripts([[0, *said]])
    begin(engine, table, dict.fromkeys(range(4), [0]), budget=len(said))
    for slot, acts in enumerate(([], [Act.SEARCH], [Act.ANSWER, Act.SEARCH], [Act.QUESTION])):
        engine.begin_turn(slot, stop_bits(acts), len(said))
    out = engine.decode(table, 1.0)
    part = len(encoded(" </question>"))
    assert out.count.tolist() == [len(said), len(said) - 1, 2 * part, part]


def test_a_tag_that_the_tool_began_is_not_completed_by_the_model(engine):
    """The automaton starts anew in each turn; the model's own closing tag counts."""
    closing = encoded(" </search>")
    table = scripts([[0, 50, *closing, *closing[-1:], 51, *closing]])
    begin(engine, table, {2: [0]}, budget=1)
    assert engine.decode(table, 1.0).stopped[0]
    engine.append(table, {2: np.asarray(closing[:-1], np.int32)})
    # The script goes on at the place of the closing bracket.
    engine.begin_turn(2, SEARCH, 20)
    out = engine.decode(table, 1.0)
    assert out.tokens[0].tolist() == [closing[-1], closing[-1], 51, *closing]


def test_a_new_trajectory_does_not_complete_the_tag_of_the_one_before(engine):
    closing = encoded(" </search>")
    table = scripts([[0, *closing], [1, closing[-1], *closing]])
    begin(engine, table, {2: [0]}, budget=len(closing) - 1)
    assert engine.decode(table, 1.0).tokens[0].tolist() == closing[:-1]
    begin(engine, table, {2: [1]})
    assert engine.decode(table, 1.0).tokens[0].tolist() == [closing[-1], *closing]


def test_end_of_text_and_the_next_message_end_a_turn(engine):
    starts = tokenizer().special("<|im_start|>")
    table = scripts([[0, 60, EOS, 61], [1, 60, 61, starts, 62], [2, *range(100, 120)]])
    begin(engine, table, {0: [0], 1: [1], 2: [2]}, stops=0, budget=5)
    out = engine.decode(table, 1.0)
    said = [row[:n].tolist() for row, n in zip(out.tokens, out.count, strict=True)]
    assert said == [[60, EOS], [60, 61, starts], [*range(100, 105)]]


# Room ---------------------------------------------------------------------------------------------


def test_a_cache_is_used_to_its_last_row_and_not_beyond(engine):
    table = scripts([[0, *np.arange(LENGTH) % 200 + 40]])
    begin(engine, table, {0: [0] * PROMPT_LENGTH}, stops=0, budget=1)
    engine.decode(table, 1.0)
    room = LENGTH - PROMPT_LENGTH
    with pytest.raises(ValueError, match=f"at most {room} more tokens, got {room + 1}"):
        engine.append(table, {0: np.full(room + 1, 5)})
    engine.clear()
    begin(engine, table, {0: [0] * PROMPT_LENGTH}, stops=0, budget=1)
    engine.decode(table, 1.0)
    engine.append(table, {0: np.full(room - 6, 5)})
    with pytest.raises(ValueError, match="at most 6 more tokens, got 7"):
        engine.begin_turn(0, 0, 7)
    engine.begin_turn(0, 0, 6)
    out = engine.decode(table, 1.0)
    assert out.tokens[0].tolist() == table[0, LENGTH - 5 : LENGTH + 1].tolist()


def test_prompts_that_do_not_fit_are_refused(engine):
    table = scripts([[0]])
    for ids in ([], [0] * (PROMPT_LENGTH + 1)):
        with pytest.raises(ValueError, match=rf"1 to {PROMPT_LENGTH} tokens, got {len(ids)}"):
            engine.prefill(table, {0: np.asarray(ids, np.int32)})
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        engine.begin_turn(0, 0, 0)


def test_truncated_sampling_needs_its_program(engine):
    prompt = np.zeros(1, np.int32)
    for sampling in (Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_p=0.9)):
        with pytest.raises(ValueError, match="EngineShape.truncated=True"):
            engine.start(0, prompt, stream_key(0), sampling)


def test_slots_must_divide_over_the_island():
    with pytest.raises(ConfigError, match="slots=6 and extend_rows=4 must divide over.* 4 slot"):
        make_engine(6, where=model(devices=4))


# Programs -----------------------------------------------------------------------------------------


def test_three_programs_whatever_is_asked_of_them():
    engine = make_engine(5, rows=2, chunk=4, decode_tokens=4, where=reciter())
    table = scripts([[0, *range(40, 80)]])
    with CompileCounter() as compiles:
        for count, sampling in ((1, GREEDY), (5, GREEDY), (2, WARM), (3, HOT)):
            prompt = np.arange(2 + 3 * count, dtype=np.int32)
            engine.prefill(table, {0: prompt})
            engine.copy_prompts([(0, i) for i in range(1, count)], [len(prompt)] * (count - 1))
            for slot in range(count):
                engine.start(slot, prompt, stream_key(count, slot), sampling)
                engine.begin_turn(slot, SEARCH, 2 + count)
            while engine.active.any():
                engine.decode(table, 0.5)
            engine.append(table, {slot: np.arange(1 + count) for slot in range(count)})
            engine.clear()
        # The third, copy, was compiled when the engine was made.
        assert compiles.take() == 2
    programs = (engine._extend, engine._copy, engine._decode)
    assert [program._cache_size() for program in programs] == [1, 1, 1]


def test_streams_differ_in_every_part():
    uid = "solver/q/0"
    parts = [
        (0, 0, 1, uid), (1, 0, 1, uid), (0, 1, 1, uid), (0, 0, 2, uid), (0, 0, 1, "solver/q/1"),
        ("evaluation", uid),
    ]  # fmt: skip
    keys = {tuple(stream_key(*p)) for p in parts}
    assert len(keys) == len(parts)
    assert stream_key(0, "a").dtype == np.uint32 and stream_key(0, "a").shape == (2,)
