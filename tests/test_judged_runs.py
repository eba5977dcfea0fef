"""Whole runs with a language model as judge and reader, which is up, down, and back again."""

import json

import pytest
from chat_server import Reply, claimed, fair, serving, text
from miniature import assert_same_run

from sspjax.checkpoint import Checkpoints
from sspjax.config import RunConfig
from sspjax.self_play.verify import VerifyCounts
from sspjax.train import Asked, TooManyFailures, refuse_failures
from sspjax.types import Group, Question
from sspjax.workdir import Workdir


def settings(service, **more):
    return {
        "steps": 3,
        "judge.kind": "llm",
        "judge.url": service.url,
        "judge.model": "m",
        "judge.tries": 2,
        "judge.backoff": 0.01,
        "judge.audit_every": 2,
        "verify.reader": "judge",
        "verify.prompt_tokens": 1024,
        "checkpoint.every": 10,
        **more,
    }


@pytest.fixture(scope="module")
def player(taught):
    """A service that judges fairly and answers whatever it reads with a name of the world."""
    name = json.loads(taught.answers.read_text().splitlines()[0])["answer"]

    def script(request):
        last = request["messages"][-1]["content"]
        return text(f"<answer> {name} </answer>") if "passages" in last else fair(request)

    return script


@pytest.fixture(scope="module")
def straight(taught, player, tmp_path_factory):
    """Three steps with a service that is always there."""
    run = taught.copy(tmp_path_factory.mktemp("judged") / "run")
    with serving(player) as service:
        log = run.train(settings(service), "--force")
    return run, service, log


def test_the_model_judges_and_reads(straight):
    run, service, log = straight
    rows = run.rows()[1:]
    assert sum(row["selfplay/accepted"] for row in rows) > 0
    assert sum(row["perf/reader_asked"] for row in rows) > 0
    assert sum(row["perf/judge_asked"] for row in rows) > 0
    assert sum(row["perf/judge_lost"] + row["perf/reader_lost"] for row in rows) == 0
    assert [row.get("judge/audit_agreement") for row in rows] == [None, 1.0, None]
    assert [row["perf/compiles"] for row in rows[1:]] == [0, 0]
    assert "eval/avg/judge" in rows[1]
    assert "ALARM" not in log
    readings = [r for step in run.trajectories().values() for r in step if r["role"] == "reader"]
    assert readings
    assert all(r["turns"][0]["act"] == "answer" and not r["turns"][0]["sampled"] for r in readings)
    # Nothing that is literally right was asked but by the audits, at the start and after step 2.
    asked = [claimed(r) for r in service.requests if '"given_answer"' in str(r["messages"])]
    right = [a for a in asked if a["given_answer"] in a["accepted_answers"]]
    assert len(right) < 2 * 20


def test_down_in_the_middle_and_back_again(straight, taught, player, tmp_path):
    """It stops in step 2 with what step 1 left, and ends as the run that met no trouble."""
    run = taught.copy(tmp_path / "run")

    def failing(request):
        done = (run.workdir / "metrics.jsonl").read_text().count("\n")
        return player(request) if done < 2 else Reply(status=503)

    stopped = pytest.raises(AssertionError, match=r"step 2: \d+ of \d+ rollouts got no")
    with serving(failing) as service, stopped as told:
        run.train(settings(service), "--force")
    assert "more than config.judge.max_failures=0.05" in str(told.value)
    assert "HTTP 503" in str(told.value)
    with Checkpoints(Workdir(run.workdir).checkpoints("self_play"), 1, read_only=True) as saved:
        assert saved.steps() == [0, 1]
    # Back at another address, which may change.
    with serving(player) as service:
        log = run.train(settings(service))
    assert "resumed at step 1" in log
    assert_same_run(run, straight[0], settings(service))


def test_down_from_the_start(taught, tmp_path):
    run = taught.copy(tmp_path / "run")
    with serving(fair) as service:
        pass
    with pytest.raises(AssertionError, match="m does not answer: ConnectError") as told:
        run.train(settings(service), "--force")
    assert "error: config.judge.url=" in str(told.value)
    assert len(run.rows()) == 1


# The share ----------------------------------------------------------------------------------------


def groups(*correct):
    question = Question(uid="q", text="?", answer="a")
    return [Group(question=question, rollouts=(), correct=c) for c in correct]


@pytest.mark.parametrize(
    ("unjudged", "verdicts", "share"),
    [
        (0, [True] * 19 + [None], None),
        (0, [True] * 18 + [None] * 2, "2 of 20"),
        (1, [True] * 19 + [None], "2 of 20"),
        (0, [None], "1 of 1"),
        (0, [], None),
    ],
)
def test_more_failures_than_allowed(unjudged, verdicts, share):
    asked = Asked(
        cursor=0,
        proposals=(),
        discarded=(),
        readings=(),
        counts=VerifyCounts(unjudged=unjudged),
    )
    if share is None:
        refuse_failures(RunConfig(), 7, asked, groups(tuple(verdicts)))
        return
    with pytest.raises(TooManyFailures, match=f"step 7: {share} rollouts"):
        refuse_failures(RunConfig(), 7, asked, groups(tuple(verdicts)))
