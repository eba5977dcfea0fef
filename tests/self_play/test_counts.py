import dataclasses
import random

import pytest
from builders import document, group, proposal, proposed, question, solved

from sspjax.config import ProposerConfig, ShortfallConfig
from sspjax.self_play.board import SHORTFALL
from sspjax.self_play.counts import REASONS, step_counts
from sspjax.self_play.filters import FILTERS
from sspjax.self_play.rewards import reward_proposals, reward_rollouts
from sspjax.self_play.verify import VerifyCounts
from sspjax.types import Group, Proposal, Reason, Replayed, Stop


def counted(proposals, groups, board, verification=None, discarded=()):
    return step_counts(
        proposals=proposals,
        discarded=discarded,
        verification=verification or VerifyCounts(),
        board=board,
        groups=groups,
        proposer_rewards=reward_proposals(proposals, groups, ProposerConfig()),
        solver_rewards=[reward_rollouts(g, ["correct"]) for g in groups],
    )


def step():
    two = proposed("two", "t0", (("x", (document("a"),)), ("y", ())))
    proposals = [
        Proposal(trajectory=two, question=question("t0", "two")),
        proposal("t1"),
        proposal("t2", reason=Reason.LEAK),
        proposal("t3", reason=Reason.LEAK),
        proposal("t4", asked=False, reason=Reason.NO_QUESTION),
    ]
    store = [Replayed(question=question("old", "old"), success_rate=0.0, step=1)]
    board = SHORTFALL["replay"](proposals, store, random.Random(0), ShortfallConfig())
    new, other, replayed = board.questions
    groups = [
        Group(
            question=new,
            rollouts=(
                solved(new, "Oslo", searched=3),
                solved(new, "x", searched=1),
                solved(new, "x", stop=Stop.TOOL_FAILED),
            ),
            correct=(True, False, None),
        ),
        group(other, ["x", "y"], [False, False]),
        group(replayed, ["Oslo", "Oslo"], [True, True]),
    ]
    return proposals, groups, board


def test_a_step_by_hand():
    counts = VerifyCounts(noise_asked=8, noise_missing=3, noise_dropped=2, unjudged=4)
    row = counted(*step(), counts)
    assert row["selfplay/accepted"] == 2
    assert row["selfplay/valid_question_rate"] == pytest.approx(2 / 5)
    assert row["selfplay/two_search_rate"] == pytest.approx(1 / 2)
    assert row["selfplay/replayed"] == 1
    assert row["selfplay/empty"] == 2
    assert row["selfplay/rejected/leak"] == 2
    assert row["selfplay/rejected/no_question"] == 1
    assert row["selfplay/rejected/verify_wrong"] == 0
    assert row["selfplay/verify_noise_missing"] == 3
    assert row["selfplay/verify_noise_dropped"] == 2
    assert row["selfplay/unjudged"] == 1
    assert row["selfplay/unsettled"] == 0
    assert row["selfplay/verify_unjudged"] == 4
    # Judged rollouts of new questions: one right in four; the replayed one does not count.
    assert row["solver/success_rate"] == pytest.approx(1 / 4)
    # 1/2 and 1 for the accepted ones, 0 for three rejected ones.
    assert row["proposer/reward/mean"] == pytest.approx(1.5 / 5)
    # Three right of six judged, the replayed group included: that is what is trained on.
    assert row["solver/reward/mean"] == pytest.approx(3 / 6)
    assert row["proposer/searches/mean"] == pytest.approx(6 / 5)
    assert row["solver/searches/mean"] == pytest.approx(4 / 7)
    # Sampled turns hold 2 tokens, tool replies 5: 7 a search and 2 for what is said.
    proposer, solver = [16, 9, 9, 9, 7], [23, 9, 2, 2, 2, 2, 2]
    assert row["proposer/response_length/mean"] == pytest.approx(sum(proposer) / 5)
    assert row["solver/response_length/mean"] == pytest.approx(sum(solver) / 7)
    assert row["response_length/mean"] == pytest.approx(sum(proposer + solver) / 12)
    assert (row["response_length/min"], row["response_length/max"]) == (2, 23)
    assert row["response_length/clip_ratio"] == 0


def test_an_outvoted_question_was_played_but_not_accepted():
    proposals, groups, board = step()
    proposals[1] = dataclasses.replace(proposals[1], reason=Reason.CONSENSUS)
    row = counted(proposals, groups, board.after(proposals))
    assert row["selfplay/accepted"] == 1
    assert row["selfplay/valid_question_rate"] == pytest.approx(1 / 5)
    assert row["selfplay/two_search_rate"] == 1
    assert row["selfplay/rejected/consensus"] == 1
    assert (row["selfplay/replayed"], row["selfplay/empty"]) == (1, 2)
    # One right of the two judged rollouts of the accepted question.
    assert row["solver/success_rate"] == pytest.approx(1 / 2)
    # 1/2 for the accepted one, 0 for four rejected ones; the solvers learn from it all the same.
    assert row["proposer/reward/mean"] == pytest.approx(0.5 / 5)
    assert row["solver/reward/mean"] == pytest.approx(3 / 6)


def test_every_rule_has_its_metric_in_every_step():
    empty = counted([], [], SHORTFALL["drop"]([], [], random.Random(0), ShortfallConfig()))
    assert empty.keys() == counted(*step()).keys()
    assert set(empty.values()) == {0.0}
    gates = ["not_grounded", "not_fluent", "consensus"]
    for name in [*FILTERS, *gates, "no_question", *(r.value for r in REASONS)]:
        assert f"selfplay/rejected/{name}" in empty


def test_discarded_proposals_count_in_the_rates():
    """Two more tries, one of them valid and without a place."""
    more = [proposal("t5"), proposal("t6", reason=Reason.LEAK)]
    row, before = counted(*step(), discarded=more), counted(*step())
    assert row["selfplay/valid_question_rate"] == pytest.approx(3 / 7)
    assert row["selfplay/rejected/leak"] == 3
    assert row["selfplay/discarded"] == 2
    assert row["proposer/reward/mean"] == before["proposer/reward/mean"]


def test_all_values_are_floats():
    assert {type(v) for v in counted(*step()).values()} == {float}


def test_a_reason_without_a_metric_is_an_error():
    proposals = [proposal("t0", reason=Reason.CLOSED_BOOK)]
    with pytest.raises(KeyError):
        counted(
            proposals, [], SHORTFALL["drop"](proposals, [], random.Random(0), ShortfallConfig())
        )


def test_groups_with_fewer_than_two_verdicts_are_counted():
    proposals, groups, board = step()
    lost = [
        Group(
            question=g.question,
            rollouts=g.rollouts,
            correct=(None,) * (len(g.correct) - 1) + (True,),
        )
        for g in groups[:2]
    ]
    row = counted(proposals, [*lost, groups[2]], board)
    assert (row["selfplay/unsettled"], row["selfplay/unjudged"]) == (2, 3)
