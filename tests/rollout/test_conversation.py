"""Multi-turn episodes: how they end, what they cost, and that the schedule is not in the sample."""

import collections
import dataclasses
import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from game_parts import (
    LENGTH,
    TINY,
    Library,
    engine_of,
    ids_of,
    make_engine,
    make_prompts,
    make_rules,
    model,
    placed,
    play,
    reciter,
    reciting_engine,
    scripts,
    token,
    tokenizer,
    weights,
    whole_context,
)

from sspjax.config import freeze
from sspjax.errors import UserError
from sspjax.learner.loss import PolicyModel, Rows, token_logprobs
from sspjax.learner.pack import pack, update_shape
from sspjax.metrics import CompileCounter
from sspjax.rollout.acts import parse_act
from sspjax.rollout.conversation import ToolError
from sspjax.rollout.engine import EngineCounts, Sampling, stream_key
from sspjax.rollout.prompts import observation_turn, smallest_observation
from sspjax.rollout.stop import STOP_TAGS
from sspjax.tools.tool import Observation
from sspjax.types import Act, Document, Example, Prompt, Role, Seed, Stop

GREEDY = Sampling(temperature=0.0)
SMALLEST = smallest_observation(TINY, tokenizer())


@functools.cache
def standard():
    """What every schedule must give: 12 groups of 4, by uid."""
    played = play(engine_of(16), weights(), make_prompts(12, 4))
    return {t.uid: t for t in played.trajectories}


def bits(trajectories) -> dict[str, bytes]:
    return {t.uid: t.logprobs.tobytes() for t in trajectories}


def shuffled(prompts, seed: int):
    """Groups in another order, members of different groups between each other."""
    prompts = list(prompts)
    random.Random(seed).shuffle(prompts)
    return prompts


# What is sampled: the schedule is not in it ------------------------------------------------------


def test_the_game_is_worth_playing():
    stops = collections.Counter(t.stop for t in standard().values())
    turns = collections.Counter(sum(turn.sampled for turn in t.turns) for t in standard().values())
    assert {Stop.ANSWER, Stop.NO_ACTION, Stop.TURNS} <= set(stops)
    assert set(turns) == {1, 2, 3, 4, 5} and turns[5] >= 5


@pytest.mark.parametrize(
    ("slots", "return_when"), [(1, 0.5), (4, 0.25), (7, 1.0), (16, 0.25), (128, 0.5)]
)
def test_tokens_are_the_same_under_every_schedule(slots, return_when):
    prompts = shuffled(make_prompts(12, 4), slots)
    engine = engine_of(slots)
    played = play(engine, weights(), prompts, return_when=return_when).trajectories
    assert ids_of(played) == ids_of(standard().values())
    for trajectory in played:
        expected = standard()[trajectory.uid].logprobs
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=2e-5, rtol=0)

    # In one program the bits are the same too, whoever the neighbours are.
    again = play(engine, weights(), shuffled(prompts, 1), return_when=1.25 - return_when)
    assert bits(again.trajectories) == bits(played)
    alone = play(engine, weights(), [p for p in prompts if p.group in ("g3", "g7")])
    assert bits(alone.trajectories).items() <= bits(played).items()


@pytest.mark.parametrize("slots", [4, 16])
def test_overlapped_tools_change_nothing(slots):
    engine, prompts = engine_of(slots), make_prompts(12, 4)
    rules = make_rules(tools={Act.SEARCH: Library(naps=0.004)})
    overlapped = play(engine, weights(), prompts, rules, deterministic=False, return_when=0.25)
    fixed = play(engine, weights(), prompts, return_when=1.0)
    assert ids_of(overlapped.trajectories) == ids_of(fixed.trajectories)
    assert bits(overlapped.trajectories) == bits(fixed.trajectories)
    assert overlapped.exposed_seconds >= 0 and overlapped.tool_seconds > 0


def test_deterministic_rounds_do_the_same_work_however_long_tools_take():
    engine, prompts, work = engine_of(16), make_prompts(12, 4), []
    for naps in (0.0, 0.01, 0.003):
        engine.counts = EngineCounts()
        play(engine, weights(), prompts, make_rules(tools={Act.SEARCH: Library(naps)}))
        work.append(engine.counts)
    assert work[0] == work[1] == work[2]


def test_randomness_and_uid_decide():
    prompts = make_prompts(4, 3)
    first = play(engine_of(16), weights(), prompts, randomness=(0, 0, 2)).trajectories
    second = play(engine_of(16), weights(), prompts, randomness=(0, 1, 2)).trajectories
    said = [tuple(t.token_ids) for t in (*first, *second)]
    assert len(set(said)) > 0.8 * len(said)
    assert [t.uid for t in first] == [f"solver/g{g}/{i}" for g in range(4) for i in range(3)]
    assert [t.prompt for t in first] == prompts and {t.policy_step for t in first} == {7}


def test_trajectories_come_in_the_order_of_their_prompts():
    prompts = shuffled(make_prompts(12, 4), 3)
    trajectories = play(engine_of(7), weights(), prompts).trajectories
    assert [t.prompt for t in trajectories] == prompts
    assert len({t.uid for t in trajectories}) == len(prompts)
    for group in {p.group for p in prompts}:
        members = [t.uid for t in trajectories if t.prompt.group == group]
        assert members == [f"solver/{group}/{i}" for i in range(4)]


def test_nothing_to_play():
    assert play(engine_of(16), weights(), []).trajectories == ()


MESHES = {"4x2": (8, 2, 4), "8x1": (8, 1, 8), "1x2": (2, 2, 4)}


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_the_same_on_every_island(mesh):
    devices, tensor, rows = MESHES[mesh]
    where = model(devices, tensor)
    engine = make_engine(16, rows=rows, chunk=32, where=where)
    prompts = make_prompts(12, 4)[:20]
    played = play(engine, placed(where), prompts).trajectories
    assert ids_of(played).items() <= ids_of(standard().values()).items()
    for trajectory in played:
        expected = standard()[trajectory.uid].logprobs
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=2e-5, rtol=0)


# Against the trainer, and against one trajectory at a time ----------------------------------------


@functools.cache
def trainer_score():
    """(micro-batch, temperature) to the trainer's log-probabilities."""
    policy = PolicyModel(model().hidden, model().unembed)

    @jax.jit
    def score(rows, temperature):
        by_role = jnp.full(len(Role), temperature, jnp.float32)
        return token_logprobs(policy, weights(), rows, by_role, chunk=128)[0]

    return score


def trainer_logprobs(trajectories, temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """(the trainer's, the sampler's) log-probabilities of all sampled tokens, as packed."""
    role = {"prompt_tokens": 40, "response_tokens": 200}
    config = freeze(
        {
            "world": {"kind": "miniwiki"},
            "batch": 12,
            "proposer": role,
            "solver": role | {"group_size": 4},
            "learner": {"row_tokens": 512, "micro_rows": 4, "kl": 0.0},
        }
    )
    examples = [Example(trajectory=t, reward=1.0, advantage=1.0, terms={}) for t in trajectories]
    batch = pack({Role.SOLVER: examples}, config, update_shape(config, "policy"))
    pairs = []
    for micro in range(int(batch.micro_stop[-1])):
        rows = Rows(*(np.asarray(vars(batch)[name][micro]) for name in Rows._fields))
        scores = np.asarray(trainer_score()(rows, temperature))
        pairs.append((scores[rows.sampled], rows.behaviour_logprob[rows.sampled]))
    assert sum(len(a) for a, _ in pairs) == sum(t.sampled.sum() for t in trajectories)
    return pairs


def five_turns_or_more(trajectories) -> int:
    return sum(sum(turn.sampled for turn in t.turns) >= 5 for t in trajectories)


def test_sampled_logprobs_are_the_trainer_s():
    trajectories = list(standard().values())
    assert five_turns_or_more(trajectories) >= 5
    for trained, sampled in trainer_logprobs(trajectories, 0.8):
        assert np.abs(trained - sampled).max() <= 1e-4
        assert sampled.min() < -4 and (sampled < 0).all()


def test_truncated_and_greedy_logprobs_are_those_of_the_whole_softmax():
    """Three ways of sampling in one program of its own."""
    engine = make_engine(8, truncated=True)
    played = {}
    for name, sampling in {
        "top-k": Sampling(temperature=0.8, top_k=3),
        "top-p": Sampling(temperature=0.8, top_p=0.7),
        "off": Sampling(temperature=0.8),
        "greedy": Sampling(temperature=0.0, top_k=3, top_p=0.7),
    }.items():
        rules = make_rules(sampling=sampling)
        trajectories = play(engine, weights(), make_prompts(12, 4), rules).trajectories
        temperature = sampling.temperature or 1.0
        for trained, sampled in trainer_logprobs(trajectories, temperature):
            assert np.abs(trained - sampled).max() <= 1e-4
        played[name] = trajectories
    assert ids_of(played["off"]) == ids_of(standard().values())
    assert five_turns_or_more(played["top-k"]) > 0 and five_turns_or_more(played["top-p"]) > 0
    assert len({tuple(t.token_ids) for t in played["greedy"]}) <= 12
    # Tokens outside the set are never drawn, yet their share is in the log-probabilities.
    mass = [np.exp(t.logprobs[t.sampled]).mean() for t in played["greedy"]]
    assert max(mass) < 0.999


@functools.cache
def told_alone(uid: str, ids: tuple[int, ...], budgets: tuple[tuple[str, int], ...]) -> tuple:
    """An episode by the book: no slots, no cache, no automaton, float64 sums."""
    rules = make_rules(**dict(budgets))
    key = jax.random.wrap_key_data(stream_key(0, 0, 1, uid))
    uniforms = np.asarray(
        jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(256))
    )
    context, spent, drawn, turns = list(ids), 0, 0, []
    for generation in range(1, rules.max_turns + 1):
        turn: list[int] = []
        while True:
            tokens = np.zeros(256, np.int32)
            tokens[: len(context)] = context
            scaled = np.asarray(whole_context()(tokens, len(context)), np.float64) / 0.8
            cdf = np.cumsum(np.exp(scaled - scaled.max()))
            chosen = int(np.searchsorted(cdf, uniforms[drawn] * cdf[-1], side="right"))
            context.append(chosen)
            turn.append(chosen)
            spent, drawn = spent + 1, drawn + 1
            text = tokenizer().decode(turn)
            tags = [STOP_TAGS[a] for a in (*rules.tools, rules.final)]
            full = spent == rules.response_tokens or len(turn) == rules.turn_tokens
            if any(t in text for t in tags) or chosen in tokenizer().end_ids or full:
                break
        turns.append((True, tuple(turn)))
        act, argument = parse_act(text, (*rules.tools, rules.final))
        if act is rules.final:
            return Stop.ANSWER, tuple(turns)
        if act is Act.NONE:
            cut = spent == rules.response_tokens and chosen not in tokenizer().end_ids
            return Stop.LENGTH if cut else Stop.NO_ACTION, tuple(turns)
        if generation == rules.max_turns:
            return Stop.TURNS, tuple(turns)
        room = min(rules.observation_tokens, rules.response_tokens - spent - 1)
        if room < SMALLEST:
            return Stop.LENGTH, tuple(turns)
        shown = observation_turn(
            TINY,
            tokenizer(),
            Library().run([argument])[0].documents,
            budget=room,
            document_tokens=rules.document_tokens,
        ).token_ids
        context += shown.tolist()
        spent += len(shown)
        turns.append((False, tuple(shown)))
    raise AssertionError("an episode ends in its last turn at the latest")


def test_random_games_against_one_trajectory_at_a_time():
    """Any group sizes, slots, budgets and schedules give what the book says."""
    rng = np.random.default_rng(0)
    stops = collections.Counter()
    for trial in range(10):
        budgets = (
            ("max_turns", int(rng.choice([2, 5]))),
            ("response_tokens", int(rng.choice([60, 200]))),
        )
        prompts = make_prompts(6, 4)
        groups = rng.choice(6, 3, replace=False)
        chosen = [p for g in groups for p in prompts[4 * g : 4 * g + int(rng.integers(1, 5))]]
        played = play(
            engine_of(int(rng.choice([1, 4, 7, 16]))),
            weights(),
            shuffled(chosen, trial),
            make_rules(**dict(budgets)),
            return_when=float(rng.choice([0.25, 0.5, 1.0])),
            deterministic=bool(rng.integers(2)),
        ).trajectories
        for t in played:
            ids = tuple(t.prompt.token_ids.tolist())
            assert ids_of([t])[t.uid] == told_alone(t.uid, ids, budgets)
            stops[t.stop] += 1
    assert set(stops) == {Stop.ANSWER, Stop.NO_ACTION, Stop.TURNS, Stop.LENGTH}


# What it costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4, 16, 128])
def test_nothing_is_prefilled_twice(slots):
    engine, prompts = engine_of(slots), make_prompts(12, 4)
    engine.counts = EngineCounts()
    trajectories = play(engine, weights(), shuffled(prompts, 5)).trajectories
    counts, first = engine.counts, {p.group: len(p.token_ids) - 1 for p in prompts}
    observed = sum(
        len(turn.token_ids) for t in trajectories for turn in t.turns if not turn.sampled
    )
    assert observed > 1000
    assert counts.prefilled == sum(first.values()) + observed
    assert counts.generated == sum(int(t.sampled.sum()) for t in trajectories)
    assert counts.slot_steps >= counts.generated and counts.slot_steps % slots == 0
    everybody = 3 * sum(first.values())
    if slots == 1:
        assert counts.copied == 0 and counts.slot_steps == counts.generated
    elif slots == 128:
        assert counts.copied == everybody
    else:
        assert 0 < counts.copied <= everybody


def test_three_programs_serve_every_role():
    engine = make_engine(5, rows=2, chunk=8, decode_tokens=8, where=reciter())
    table = scripts([[i, *tokenizer().encode("<search> name </search>")] for i in range(3)])

    def prompts(role, count, size):
        return [reciting(i % 3, f"g{i}", role) for i in range(count) for _ in range(size)]

    solver = make_rules(sampling=GREEDY)
    proposer = make_rules(sampling=GREEDY, final=Act.QUESTION, max_turns=3)
    reader = make_rules(tools={}, max_turns=1, response_tokens=16, turn_tokens=16)
    with CompileCounter() as compiles:
        play(engine, table, prompts(Role.SOLVER, 2, 3), solver)
        # The third, copy, was compiled when the engine was made.
        assert compiles.take() == 2
        play(engine, table, prompts(Role.PROPOSER, 1, 1), proposer)
        play(engine, table, prompts(Role.READER, 9, 2), reader)
        for temperature in (0.0, 0.3, 2.0):
            rules = dataclasses.replace(solver, sampling=Sampling(temperature=temperature))
            play(engine, table, prompts(Role.SOLVER, 4, 5), rules, deterministic=False)
        assert compiles.take() == 0
    programs = (engine._extend, engine._copy, engine._decode)
    assert [program._cache_size() for program in programs] == [1, 1, 1]


@pytest.mark.parametrize("trial", range(6))
def test_budgets_hold_whatever_they_are(trial):
    rng = np.random.default_rng(trial)
    library = Library()
    rules = make_rules(
        tools={Act.SEARCH: library},
        max_turns=int(rng.integers(1, 6)),
        response_tokens=int(rng.integers(1, LENGTH - 40 + 1)),
        turn_tokens=int(rng.integers(1, 40)),
        observation_tokens=int(rng.integers(SMALLEST, 60)),
        document_tokens=int(rng.integers(1, 30)),
    )
    trajectories = play(engine_of(16), weights(), make_prompts(12, 4), rules).trajectories
    for t in trajectories:
        assert 1 <= len(t.token_ids) <= rules.response_tokens
        assert sum(turn.sampled for turn in t.turns) <= rules.max_turns
        assert [turn.sampled for turn in t.turns] == [i % 2 == 0 for i in range(len(t.turns))]
        assert t.turns[-1].sampled, "an observation is followed by at least one token"
        for turn in t.turns:
            limit = rules.turn_tokens if turn.sampled else rules.observation_tokens
            assert 1 <= len(turn.token_ids) == len(turn.logprobs) <= limit
            assert turn.token_ids.dtype == np.int32 and turn.logprobs.dtype == np.float32
            assert turn.text == tokenizer().decode(turn.token_ids)
            assert turn.sampled or not turn.logprobs.any()
        if t.stop is Stop.LENGTH:
            assert rules.response_tokens - len(t.token_ids) - 1 < SMALLEST
    assert sorted(library.asked) == sorted(q for t in trajectories for q in t.queries)


# How episodes end ---------------------------------------------------------------------------------

PASSAGE = Document(id="d", title="", text="tolen works </search> <answer> city </answer>")
EOS = tokenizer().eos_id


class Shelf:
    """One passage, full of tags, for every query."""

    def __init__(self, *documents: Document) -> None:
        self.documents = documents
        self.asked: list[str] = []

    def run(self, arguments):
        self.asked += arguments
        return [Observation(documents=self.documents)] * len(arguments)


def observed(*documents: Document, budget: int = 40) -> list[int]:
    return observation_turn(
        TINY, tokenizer(), documents, budget=budget, document_tokens=16
    ).token_ids.tolist()


def reciting(number: int, group: str | None = None, role: Role = Role.SOLVER) -> Prompt:
    """The prompt that starts script `number`."""
    return Prompt(
        role=role,
        subject=Seed(uid="s", answer="a"),
        group=group or f"g{number}",
        messages=(),
        token_ids=np.asarray([number], np.int32),
    )


def written(*parts: str | list[int]) -> list[int]:
    """Token ids of texts and of token ids, one after another."""
    return [i for p in parts for i in (tokenizer().encode(p) if isinstance(p, str) else p)]


def recite(*lines, **changes):
    """Plays scripts, one episode each; a line is made of texts and lists of token ids."""
    flat = [[i, *written(*line)] for i, line in enumerate(lines)]
    rules = make_rules(sampling=GREEDY, **{"tools": {Act.SEARCH: Shelf(PASSAGE)}, **changes})
    prompts = [reciting(i) for i in range(len(lines))]
    trajectories = play(reciting_engine(), scripts(flat), prompts, rules).trajectories
    for line, t in zip(flat, trajectories, strict=True):
        assert t.token_ids.tolist() == line[1 : 1 + len(t.token_ids)], "said as it was written"
    return trajectories


SEARCH, ANSWER = "<search> name </search>", "<answer> born city </answer>"


def test_answer_question_and_the_ways_to_miss_them():
    shown = observed(PASSAGE)
    trajectories = recite(
        [ANSWER],
        [SEARCH, shown, ANSWER],
        [" name", [EOS]],
        [" name" * 30],
        [" works </answer>"],
        ["<question> born </question> ", ANSWER],
        ["<answer> born <search> name </search>", shown, "</search>"],
        ["<search> </search>", shown, "<answer></answer>"],
    )
    assert [t.stop for t in trajectories] == [
        Stop.ANSWER,
        Stop.ANSWER,
        Stop.NO_ACTION,  # end of text
        Stop.NO_ACTION,  # the turn's budget
        Stop.NO_ACTION,  # nothing was opened
        Stop.ANSWER,  # the question tag is not the solver's
        Stop.NO_ACTION,
        Stop.ANSWER,
    ]
    assert [t.answer for t in trajectories[:2]] == ["born city"] * 2
    assert [t.queries for t in trajectories] == [(), ("name",), (), (), (), (), ("name",), ("",)]
    assert trajectories[2].token_ids.tolist() == [token(" name"), EOS]
    assert len(trajectories[3].token_ids) == 24
    assert trajectories[5].answer == "born city" and trajectories[7].answer == ""
    assert trajectories[1].documents == (PASSAGE,)
    assert [turn.act for turn in trajectories[1].turns] == [Act.SEARCH, Act.NONE, Act.ANSWER]


def test_the_proposer_ends_with_a_question_and_not_with_an_answer():
    question = "<question> born city </question>"
    trajectories = recite(
        [question], [ANSWER, question], [SEARCH, observed(PASSAGE), question], final=Act.QUESTION
    )
    assert [t.stop for t in trajectories] == [Stop.QUESTION] * 3
    assert [t.turns[-1].argument for t in trajectories] == ["born city"] * 3
    assert [t.answer for t in trajectories] == [None] * 3


def test_ten_generations_are_nine_searches():
    shelf = Shelf()
    turn = [SEARCH, observed()]
    (t,) = recite(turn * 12, tools={Act.SEARCH: shelf}, max_turns=10, response_tokens=LENGTH - 1)
    assert t.stop is Stop.TURNS
    assert [turn.sampled for turn in t.turns].count(True) == 10
    assert len(t.queries) == 9 and shelf.asked == ["name"] * 9
    assert t.turns[-1].act is Act.SEARCH


def test_an_observation_at_the_very_end_of_the_budget():
    search = len(tokenizer().encode(SEARCH))
    script = [SEARCH, observed(), " works" * 9]
    exact = search + SMALLEST + 1
    for response_tokens, stop, queries, length in (
        (exact, Stop.LENGTH, 1, exact),  # one token after the observation
        (exact + 3, Stop.LENGTH, 1, exact + 3),
        (exact - 1, Stop.LENGTH, 0, search),  # no room to answer after it: not executed
        (search, Stop.LENGTH, 0, search),
        (search - 1, Stop.LENGTH, 0, search - 1),  # cut inside the tag
        (1, Stop.LENGTH, 0, 1),
    ):
        shelf = Shelf()
        (t,) = recite(script, tools={Act.SEARCH: shelf}, response_tokens=response_tokens)
        assert (t.stop, len(t.queries), len(t.token_ids)) == (stop, queries, length)
        assert len(shelf.asked) == queries


def test_an_answer_in_the_last_token_counts():
    size = len(tokenizer().encode(ANSWER))
    for response_tokens, stop in ((size, Stop.ANSWER), (size - 1, Stop.LENGTH)):
        (t,) = recite([ANSWER], response_tokens=response_tokens)
        assert t.stop is stop and len(t.token_ids) == response_tokens
    for turn_tokens, stop in ((size, Stop.ANSWER), (size - 1, Stop.NO_ACTION)):
        (t,) = recite([ANSWER], turn_tokens=turn_tokens)
        assert t.stop is stop and len(t.token_ids) == turn_tokens


def test_long_passages_are_cut_to_what_is_left():
    long = Document(id="l", title="", text=" tolen works" * 50)
    search = len(tokenizer().encode(SEARCH))
    for left in (SMALLEST + 9, SMALLEST + 20):
        shown = observed(long, budget=left)
        assert SMALLEST < len(shown) <= left
        (t,) = recite(
            [SEARCH, shown, " works" * 40],
            tools={Act.SEARCH: Shelf(long)},
            response_tokens=search + left + 1,
        )
        assert t.stop is Stop.LENGTH and len(t.token_ids) == search + left + 1


def test_a_slot_is_filled_to_its_last_row():
    """Prompt and response together as long as the cache."""
    shown = observed(PASSAGE)
    turn = [SEARCH, shown]
    (t,) = recite(
        turn * 8 + [" works" * 200], max_turns=9, response_tokens=LENGTH - 1, turn_tokens=200
    )
    assert len(t.token_ids) == LENGTH - 1 and t.stop is Stop.LENGTH
    assert len(t.queries) == 8
    with pytest.raises(ValueError, match=f"slot of {LENGTH} tokens, got a prompt of 1 and"):
        recite([ANSWER], response_tokens=LENGTH)


def test_tags_are_found_in_every_tokenisation():
    rng = random.Random(0)
    table = tokenizer().token_bytes
    text = "<search> name works </search>"
    lines = [spelled(text.encode(), table, rng) for _ in range(60)]
    assert len({tuple(line) for line in lines}) == 60
    for t, line in zip(
        recite(*[[line] for line in lines], max_turns=1, turn_tokens=40), lines, strict=True
    ):
        assert t.stop is Stop.TURNS and t.turns[0].argument == "name works"
        assert t.token_ids.tolist() == line


def spelled(data: bytes, table, rng: random.Random) -> list[int]:
    """One of the token sequences that spell `data`, at random."""
    ids: list[int] = []
    while data:
        fitting = [i for i, b in enumerate(table) if b and data.startswith(b)]
        ids.append(rng.choice(fitting))
        data = data[len(table[ids[-1]]) :]
    return ids


def test_what_follows_a_tag_in_its_token_is_kept_and_read_by_the_model():
    closing = [token(" </"), token("search"), token(">.")]
    shown = observed(PASSAGE)
    (t,) = recite(["<search> name", closing, shown, ANSWER])
    assert t.turns[0].text == "<search> name </search>." and t.turns[0].argument == "name"
    assert t.turns[0].token_ids.tolist()[-3:] == closing
    assert t.turns[1].token_ids.tolist() == shown and t.stop is Stop.ANSWER


# Tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_failed_tool_ends_its_own_trajectory_alone(deterministic):
    rules = make_rules(tools={Act.SEARCH: Library(broken="guild")})
    played = play(
        engine_of(4), weights(), make_prompts(12, 4), rules, deterministic=deterministic
    ).trajectories
    failed = [t for t in played if t.failed]
    assert len(failed) > 5
    for t in played:
        whole = standard()[t.uid]
        said = np.concatenate([t.token_ids, whole.token_ids[len(t.token_ids) :]])
        assert np.array_equal(said, whole.token_ids), "the same up to its end"
        if t.failed:
            assert len(whole.turns) > len(t.turns), "no turn follows"
            assert t.turns[-1].act is Act.SEARCH and "guild" in t.turns[-1].argument
        else:
            assert len(whole.turns) == len(t.turns) and t.stop is whole.stop


class Broken:
    def __init__(self, answer, after: int = 0) -> None:
        self._answer, self._calls_left = answer, after

    def run(self, arguments):
        if self._calls_left:
            self._calls_left -= 1
            return Library().run(arguments)
        return self._answer(arguments)


def raising(arguments):
    raise OSError("the index is gone")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            raising,
            r"search: \d+ calls, the first '.*': expected .*, got OSError: the index is gone",
        ),
        (lambda arguments: [], r"search: \d+ calls, .* expected one observation for each, got 0"),
    ],
)
def test_a_broken_tool_stops_the_play_and_leaves_nothing_behind(
    deterministic, after, answer, message
):
    engine, prompts = engine_of(16), make_prompts(12, 4)
    rules = make_rules(tools={Act.SEARCH: Broken(answer, after)})
    began = time.perf_counter()
    with pytest.raises(ToolError, match=message):
        play(engine, weights(), prompts, rules, deterministic=deterministic)
    assert time.perf_counter() - began < 20
    for some in (prompts[:2], prompts):
        played = play(engine, weights(), some).trajectories
        assert ids_of(played).items() <= ids_of(standard().values()).items()


def test_what_a_user_can_mend_is_told_as_it_is():
    class Unusable:
        def run(self, arguments):
            raise UserError("expected another file")

    with pytest.raises(UserError, match="^expected another file$"):
        play(
            engine_of(16), weights(), make_prompts(2, 2), make_rules(tools={Act.SEARCH: Unusable()})
        )


def test_parameters_that_diverged_leave_nothing_behind():
    engine, prompts = engine_of(16), make_prompts(12, 4)
    diverged = {name: np.nan * x for name, x in weights().items()}
    lost = play(engine, diverged, prompts).trajectories
    assert all(np.isnan(t.logprobs).all() for t in lost)
    played = play(engine, weights(), prompts).trajectories
    assert bits(played) == bits(standard().values())


def test_every_tool_gets_its_own_calls():
    search, opened = Shelf(PASSAGE), Shelf()
    trajectories = recite(
        [SEARCH, observed(PASSAGE), "<open> d </open>", observed(), ANSWER],
        ["<open> e </open>", observed(), SEARCH, observed(PASSAGE), ANSWER],
        tools={Act.SEARCH: search, Act.OPEN: opened},
    )
    assert [t.stop for t in trajectories] == [Stop.ANSWER] * 2
    assert search.asked == ["name"] * 2 and sorted(opened.asked) == ["d", "e"]
    assert trajectories[0].opened == ("d",) and trajectories[0].queries == ("name",)


def test_turns_are_watched_as_they_happen():
    seen = collections.defaultdict(list)
    trajectories = play(
        engine_of(4), weights(), make_prompts(3, 2), watch=lambda uid, turn: seen[uid].append(turn)
    ).trajectories
    assert dict(seen) == {t.uid: list(t.turns) for t in trajectories}


# What is refused ----------------------------------------------------------------------------------


def test_prompts_of_a_group_must_be_the_same():
    prompts = [reciting(0, "g"), reciting(1, "g")]
    with pytest.raises(ValueError, match="group g: expected one prompt, got two that differ"):
        play(reciting_engine(), scripts([[0], [1]]), prompts, make_rules(sampling=GREEDY))


def test_rules_that_leave_no_room_are_refused():
    for changes in ({"max_turns": 0}, {"response_tokens": 0}, {"turn_tokens": 0}):
        with pytest.raises(ValueError, match="at least 1, got"):
            recite([ANSWER], **changes)
    with pytest.raises(ValueError, match=f"observation_tokens of at least {SMALLEST}"):
        recite([ANSWER], observation_tokens=SMALLEST - 1)
    (t,) = recite([ANSWER], observation_tokens=0, tools={})
    assert t.stop is Stop.ANSWER
