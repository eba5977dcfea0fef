import random

import numpy as np
import pytest
from builders import document, proposal, question, solved
from hypothesis import given
from hypothesis import strategies as st

from sspjax.config import VerifyConfig
from sspjax.self_play.judge import JUDGES
from sspjax.self_play.verify import (
    VerifyCounts,
    blob_pool,
    draw_noise,
    fit,
    noise_pool,
    single,
    verdict,
    verify,
)
from sspjax.types import Document, Prompt, Reason, Role, Stop


def stream(name):
    return random.Random(f"0/0/1/{name}")


def reader_prompt(asked, documents, group):
    """Ten tokens a document and five for the question; the messages are the documents."""
    return Prompt(
        role=Role.READER,
        subject=asked,
        group=group,
        messages=tuple(documents),
        token_ids=np.zeros(5 + 10 * len(documents), np.int32),
    )


class Reader:
    """Answers right where the evidence is, by default; remembers what it was given."""

    def __init__(self, answer=None):
        self.answer = answer or (lambda p: p.subject.answer if evident(p) else "no idea")
        self.calls = []

    def __call__(self, prompts):
        self.calls.append(tuple(prompts))
        return [self.read(p) for p in prompts]

    def read(self, p):
        said = self.answer(p)
        if said == "failed":
            return solved(p.subject, None, p.group, Stop.TOOL_FAILED, Role.READER)
        return solved(p.subject, said, p.group, role=Role.READER)

    @property
    def read_by_group(self):
        return {p.group: p.messages for call in self.calls for p in call}


def evident(p):
    return set(p.subject.evidence) <= set(p.messages)


def run(proposals, read=None, judge=JUDGES["exact"], **settings):
    config = VerifyConfig(**{"noise": 2, "prompt_tokens": 1000, **settings})
    return verify(
        proposals,
        config,
        stream=stream,
        reader_prompt=reader_prompt,
        read=read or Reader(),
        judge=judge,
    )


def reasons(result):
    return [p.reason for p in result.proposals]


def flat(units):
    return [d for unit in units for d in unit]


def batch(size=4):
    return [proposal(f"t{i}", [document(f"d{i}a"), document(f"d{i}b")]) for i in range(size)]


# Noise --------------------------------------------------------------------------------------------

passages = st.builds(
    Document, id=st.sampled_from("abcdefgh"), title=st.just("t"), text=st.sampled_from("uvwxyz")
)


@given(
    st.lists(st.lists(passages, max_size=4), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_noise_is_distinct_and_never_evidence(shown, count, seed):
    proposals = [proposal(f"t{i}", documents) for i, documents in enumerate(shown)]
    evidence = proposals[0].trajectory.documents
    noise = flat(draw_noise(evidence, noise_pool(proposals), count, random.Random(seed)))
    assert len(noise) <= count
    assert len({d.id for d in noise}) == len({d.text for d in noise}) == len(noise)
    assert not {d.id for d in noise} & {d.id for d in evidence}
    assert not {d.text for d in noise} & {d.text for d in evidence}
    assert set(noise) <= {d for p in proposals[1:] for d in p.trajectory.documents}


def test_noise_is_all_there_is_when_more_is_asked():
    proposals = batch(3)
    pool = noise_pool(proposals)
    assert {d.id for d in flat(pool)} == {"d0a", "d0b", "d1a", "d1b", "d2a", "d2b"}
    noise = draw_noise(proposals[0].question.evidence, pool, 9, random.Random(0))
    assert {d.id for d in flat(noise)} == {"d1a", "d1b", "d2a", "d2b"}


def test_invalid_proposals_serve_as_noise():
    unasked = proposal("t1", [document("x")], asked=False, reason=Reason.NO_QUESTION)
    assert [d.id for d in flat(noise_pool([proposal("t0"), unasked]))] == ["x"]
    assert blob_pool([proposal("t0"), unasked]) == ((document("x"),),)


@given(st.permutations(range(5)))
def test_pool_does_not_depend_on_order(order):
    same_id = [Document(id="a", title="t", text=str(i)) for i in range(3)]
    same_text = [Document(id=i, title="t", text="1") for i in "bc"]
    proposals = [proposal(f"t{i}", [d]) for i, d in enumerate([*same_id, *same_text])]
    pool = noise_pool([proposals[i] for i in order])
    assert pool == noise_pool(proposals)
    assert [(d.id, d.text) for d in flat(pool)] == [("a", "0"), ("b", "1")]


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_counts_of_the_papers_table(count):
    """Eight proposers of two passages: a question sees its own two and as many as asked for."""
    reader = Reader()
    result = run(batch(8), reader, noise=count)
    assert {len(shown) for shown in reader.read_by_group.values()} == {2 + count}
    assert result.counts == VerifyCounts(noise_asked=8 * count)


@given(
    st.lists(st.lists(passages, max_size=4), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_blobs_are_never_evidence_and_no_passage_comes_twice(shown, count, seed):
    proposals = [proposal(f"t{i}", documents) for i, documents in enumerate(shown)]
    evidence = proposals[0].trajectory.documents
    blobs = draw_noise(evidence, blob_pool(proposals), count, random.Random(seed))
    assert len(blobs) <= count
    assert all(blobs)
    assert len({d.id for d in flat(blobs)}) == len(flat(blobs))
    assert not {d.id for d in flat(blobs)} & {d.id for d in evidence}
    assert not {d.text for d in flat(blobs)} & {d.text for d in evidence}


def test_a_blob_is_all_that_another_proposer_was_shown():
    """A batch of three has two others: at most two noise blobs, two passages each."""
    reader = Reader()
    result = run(batch(3), reader, noise=4, noise_unit="blob")
    assert {len(shown) for shown in reader.read_by_group.values()} == {6}
    assert result.counts == VerifyCounts(noise_asked=12, noise_missing=6)
    for shown in reader.read_by_group.values():
        # Whole blobs, in the order in which they were shown.
        assert [d.id[:2] for d in shown[::2]] == [d.id[:2] for d in shown[1::2]]
        assert all(d.id.endswith("a") for d in shown[::2])
    # Room for two blobs, the own one among them: one of two is dropped.
    result = run(batch(3), Reader(), noise=2, noise_unit="blob", prompt_tokens=5 + 59)
    assert reasons(result) == [None] * 3
    assert result.counts == VerifyCounts(noise_asked=6, noise_dropped=3)


def test_counts_add_up():
    total = VerifyCounts(
        noise_asked=1, noise_missing=2, noise_dropped=3, unjudged=4
    ) + VerifyCounts(noise_asked=10, noise_missing=20, noise_dropped=30, unjudged=40)
    assert total == VerifyCounts(noise_asked=11, noise_missing=22, noise_dropped=33, unjudged=44)


# One prompt ---------------------------------------------------------------------------------------


def fitted(evidence, noise, budget, seed=0):
    def prompt(documents):
        return reader_prompt(question(evidence=evidence), documents, "g")

    return fit(single(evidence), single(noise), random.Random(seed), prompt, budget)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 100), st.integers(0, 9))
def test_own_evidence_is_never_cut(own, other, budget, seed):
    evidence = [document(f"e{i}") for i in range(own)]
    noise = [document(f"n{i}") for i in range(other)]
    result = fitted(evidence, noise, budget, seed)
    room = (budget - 5) // 10
    if room < own or budget < 5:
        assert result.prompt is None
        return
    shown = result.prompt.messages
    assert len(result.prompt.token_ids) <= budget
    assert set(shown) == {*evidence, *noise[: room - own]}
    assert result.dropped == max(0, own + other - room)


def test_evidence_stands_anywhere():
    evidence, noise = [document("e")], [document(f"n{i}") for i in range(3)]
    places = {fitted(evidence, noise, 99, s).prompt.messages.index(evidence[0]) for s in range(40)}
    assert places == {0, 1, 2, 3}


# The verdict --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "samples", "reason"),
    [
        ((True,), 1, None),
        ((False,), 1, Reason.VERIFY_WRONG),
        ((None,), 1, Reason.VERIFY_ERROR),
        ((True, True, True), 3, None),
        ((True, True, False), 3, Reason.VERIFY_WRONG),
        ((True, None, True), 3, Reason.VERIFY_ERROR),
        ((None, False), 2, Reason.VERIFY_WRONG),
        ((True, False), 1, None),
        ((True, True), 1, Reason.COUNTERFACTUAL),
        ((True, None), 1, Reason.VERIFY_ERROR),
        ((None, True), 1, Reason.COUNTERFACTUAL),
        ((False, True), 1, Reason.VERIFY_WRONG),
    ],
)
def test_verdict(correct, samples, reason):
    assert verdict(correct, samples) is reason


# The whole ----------------------------------------------------------------------------------------


def test_all_samples_of_all_questions_are_read_in_one_call():
    proposals = [
        *batch(2),
        proposal("t2", [document("x")], reason=Reason.LEAK),
        proposal("t3", [document("y")], asked=False, reason=Reason.NO_QUESTION),
    ]
    reader = Reader()
    result = run(proposals, reader, samples=3)
    assert [len(call) for call in reader.calls] == [6]
    assert list(reader.read_by_group) == [f"t{i}/verify/{s}" for i in (0, 1) for s in range(3)]
    assert reasons(result) == [None, None, Reason.LEAK, Reason.NO_QUESTION]
    assert [p.trajectory for p in result.proposals] == [p.trajectory for p in proposals]
    assert len(result.readings) == 6
    assert result.counts == VerifyCounts(noise_asked=12)


def test_one_wrong_sample_rejects_and_an_error_is_no_pass():
    said = {"t0/verify/1": "wrong", "t1/verify/0": "failed", "t3/verify/1": None}
    reader = Reader(lambda p: said.get(p.group, p.subject.answer))
    result = run(batch(), reader, samples=2)
    assert reasons(result) == [
        Reason.VERIFY_WRONG,
        Reason.VERIFY_ERROR,
        None,
        Reason.VERIFY_WRONG,
    ]
    assert result.counts.unjudged == 1


def test_readings_without_a_verdict_reject_and_are_counted():
    result = run(batch(), samples=2, judge=lambda claims: [None, *[True] * (len(claims) - 1)])
    assert reasons(result) == [Reason.VERIFY_ERROR, None, None, None]
    assert result.counts.unjudged == 1


def test_samples_differ_in_their_noise():
    reader = Reader()
    run(batch(8), reader, samples=4)
    assert len({reader.read_by_group[f"t0/verify/{s}"] for s in range(4)}) == 4


def test_counterfactual_reads_the_noise_alone():
    reader = Reader()
    assert reasons(run(batch(), reader, samples=2, counterfactual=True)) == [None] * 4
    shown = reader.read_by_group
    for i, p in enumerate(batch()):
        alone = shown[f"t{i}/verify/counterfactual"]
        assert set(alone) == set(shown[f"t{i}/verify/0"]) - set(p.question.evidence)
        assert len(alone) == 2


def test_a_question_answered_without_its_evidence_is_rejected():
    reader = Reader(lambda p: p.subject.answer)
    assert reasons(run(batch(), reader, counterfactual=True)) == [Reason.COUNTERFACTUAL] * 4


def test_counterfactual_without_noise_is_the_closed_book():
    reader = Reader(lambda p: p.subject.answer)
    result = run(batch(1), reader, noise=0, counterfactual=True)
    assert reader.read_by_group["t0/verify/counterfactual"] == ()
    assert reasons(result) == [Reason.COUNTERFACTUAL]


def test_noise_that_is_missing_or_does_not_fit_is_counted():
    # Two questions of two passages each: two passages of noise at most, and room for one.
    result = run(batch(2), noise=5, samples=2, prompt_tokens=5 + 30)
    assert reasons(result) == [None, None]
    assert result.counts == VerifyCounts(noise_asked=20, noise_missing=12, noise_dropped=4)


def test_evidence_that_does_not_fit_is_rejected_unread():
    long = proposal("t9", [document(f"l{i}") for i in range(4)])
    reader = Reader()
    result = run([*batch(2), long], reader, prompt_tokens=5 + 39)
    assert reasons(result) == [None, None, Reason.VERIFY_TOO_LONG]
    assert set(reader.read_by_group) == {"t0/verify/0", "t1/verify/0"}


@given(st.permutations(range(4)))
def test_what_is_read_does_not_depend_on_order(order):
    proposals, straight, shuffled = batch(), Reader(), Reader()
    run(proposals, straight, samples=2, counterfactual=True)
    run([proposals[i] for i in order], shuffled, samples=2, counterfactual=True)
    assert shuffled.read_by_group == straight.read_by_group


def test_what_is_read_does_not_depend_on_how_many_are_read():
    proposals = batch()
    everybody, alone = Reader(), Reader()
    run(proposals, everybody)
    rejected = [
        p if i == 2 else proposal(f"t{i}", p.question.evidence, reason=Reason.LEAK)
        for i, p in enumerate(proposals)
    ]
    run(rejected, alone)
    assert alone.read_by_group == {"t2/verify/0": everybody.read_by_group["t2/verify/0"]}


def test_reader_none_passes_what_the_rules_passed():
    proposals = [proposal("t0"), proposal("t1", reason=Reason.TOO_LONG)]
    reader = Reader()
    assert reasons(run(proposals, reader, reader="none")) == [None, Reason.TOO_LONG]
    assert not reader.calls


def test_nothing_to_read_reads_nothing():
    reader = Reader()
    run([proposal("t0", reason=Reason.TOO_LONG)], reader)
    assert not reader.calls


def test_a_reader_that_skips_a_prompt_is_an_error():
    with pytest.raises(ValueError, match="expected 4 trajectories, got 0"):
        run(batch(), lambda prompts: [])
