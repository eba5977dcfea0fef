"""Questions to numbers: the command on a finished run, its modes, and the arithmetic."""

import dataclasses
import gzip
import io
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import rich.console

from sspjax import evaluate
from sspjax.command_line import UserError, load_config
from sspjax.config import ConfigError, EvalConfig, default, freeze
from sspjax.examiner import benchmarks, metrics_row, score, summarise
from sspjax.metrics import Progress
from sspjax.reopen import recorded_config, reopen, saved_policies
from sspjax.retrieval.client import RetrievalError
from sspjax.rollout.prompts import PromptTooLong
from sspjax.train import Setup, evaluation
from sspjax.types import Act, Group, Prompt, Question, Role, Stop, Trajectory, Turn

GREEDY = EvalConfig(questions=4)


@dataclasses.dataclass(frozen=True)
class Opened:
    """The finished run, opened once on this process's eight devices."""

    setup: Setup
    state: Any


@pytest.fixture(scope="module")
def opened(finished_demo) -> Opened:
    setup = reopen(recorded_config(finished_demo.workdir), finished_demo.workdir)
    return Opened(setup, saved_policies(setup, None)[0])


def files_of(folder: pathlib.Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


# The command --------------------------------------------------------------------------------------


def test_results_of_a_run_as_json_as_trajectories_and_as_a_table(finished_demo, tmp_path, capsys):
    out, workdir = tmp_path / "new" / "results.json", finished_demo.workdir
    before = files_of(workdir)
    evaluate.main(
        [f"--config={finished_demo.config}", f"--workdir={workdir}", "--step=0", f"--out={out}"]
    )
    assert files_of(workdir) == before
    results = json.loads(out.read_text())
    summary = json.loads((workdir / "summary.json").read_text())["before"]
    assert set(results["benchmarks"]) == {"1hop", "2hop"}
    for name, key in (("1hop", "onehop_em"), ("2hop", "twohop_em")):
        own = results["benchmarks"][name]
        assert own["em"] == summary[key]
        assert 0 <= own["em"] <= own["f1"] <= 100
        assert own["count"] == 4
    assert results["general_avg"] is None
    assert results["multihop_avg"] == results["benchmarks"]["2hop"]["em"]
    assert results["avg"] == summary["avg_em"]
    assert results["config"]["eval"]["temperature"] == 0.0
    # Its own checkpoint of step 0 was dropped for later ones.
    assert results["checkpoint"] == str(workdir / "checkpoints" / "warm_start" / "20")
    rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert [row["id"].split("/")[0] for row in rows] == ["1hop"] * 4 + ["2hop"] * 4
    assert all(row["turns"][0]["sampled"] for row in rows)
    assert any(turn["act"] == "search" for row in rows for turn in row["turns"])
    table = capsys.readouterr().out
    assert "benchmark" in table
    assert "2hop" in table
    assert "mean, all" in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights=folder"], "--workdir: expected .* or --weights with --config"),
        (["--workdir={run}", "--weights=folder"], "expected config.json in folder"),
        ([], "--workdir: expected"),
        (["--workdir={run}", "--step=first"], "--step=first: expected a number or last"),
        (["--workdir={run}", "--step=7"], "checkpoint of step 7, kept are: 0, 1, 2"),
        (["--workdir={run}/nowhere"], "is not the workdir of a run"),
        (["--workdir={run}", "--samples=0"], "config.eval.samples=0: must be at least 1"),
        (
            ["--workdir={run}", "--temperature=-1"],
            "eval.temperature=-1.0: must be at least 0",
        ),
        (["--workdir={run}", "--config.model.prompts=ssp"], "config.model.prompts='ssp': the run"),
    ],
)
def test_what_cannot_be_evaluated_is_told(finished_demo, tmp_path, flags, message):
    flags = [flag.format(run=finished_demo.workdir) for flag in flags]
    with pytest.raises((UserError, ConfigError), match=message):
        evaluate.main([*flags, f"--out={tmp_path}/results.json"])


@pytest.mark.parametrize("name", ["results.jsonl", "."])
def test_results_have_a_file_of_their_own(finished_demo, tmp_path, name):
    with pytest.raises(UserError, match="expected the name of a .json file"):
        evaluate.main([f"--workdir={finished_demo.workdir}", f"--out={tmp_path / name}"])


def test_nothing_to_answer_is_told(opened):
    none = dataclasses.replace(opened.setup.config.world, kind="none")
    setup = dataclasses.replace(
        opened.setup, config=dataclasses.replace(opened.setup.config, world=none)
    )
    console = rich.console.Console(file=io.StringIO())
    with pytest.raises(UserError, match="nothing to answer"):
        evaluate.examination(setup, opened.state, 2, GREEDY, console)


# A saved policy -----------------------------------------------------------------------------------


def test_parameters_are_restored_without_their_optimizer(finished_demo, opened):
    state, step, folder = saved_policies(opened.setup, None)
    assert (step, folder) == (2, finished_demo.workdir / "checkpoints" / "self_play" / "2")
    assert int(state.step) == 2
    (policy,) = state.policies.values()
    assert policy.opt_state is None
    first = saved_policies(opened.setup, 0)[0].policies["policy"].params["embedding"]
    last = policy.params["embedding"]
    assert last.dtype == np.float32
    assert last.shape == (640, 128)
    assert np.abs(np.asarray(last) - np.asarray(first)).max() > 0


# Modes --------------------------------------------------------------------------------------------


def played(opened: Opened, questions: Sequence[Question], how: EvalConfig) -> tuple[Group, ...]:
    return evaluation(opened.setup, opened.state, 2, {"asked": questions}, how)[1]


def own_questions(opened: Opened, name: str = "1hop") -> Sequence[Question]:
    return benchmarks(opened.setup.config, opened.setup.workdir.world)[name]


def test_an_agent_searches_over_several_turns(opened):
    groups = played(opened, own_questions(opened), GREEDY)
    assert [len(g.rollouts) for g in groups] == [1] * 4
    assert any(rollout.queries for g in groups for rollout in g.rollouts)
    assert any(len(rollout.turns) > 2 for g in groups for rollout in g.rollouts)


def test_closed_book_has_one_turn_and_no_tool(opened):
    how = dataclasses.replace(GREEDY, mode="closed_book")
    for group in played(opened, own_questions(opened), how):
        (turn,) = group.rollouts[0].turns
        assert turn.sampled
        assert turn.act in (Act.ANSWER, Act.NONE)


def test_rag_reads_what_one_search_of_the_question_finds(opened):
    questions = own_questions(opened)
    found = opened.setup.retriever.search([q.text for q in questions], topk=2)
    for group, documents in zip(
        played(opened, questions, dataclasses.replace(GREEDY, mode="rag")), found, strict=True
    ):
        prompt = group.rollouts[0].prompt
        assert prompt.role is Role.READER
        assert len(prompt.token_ids) <= 144
        assert documents[0].text in prompt.messages[0].content
        assert group.rollouts[0].queries == ()


def test_rag_shows_fewer_passages_where_all_do_not_fit(opened):
    (question, *_) = own_questions(opened)
    both = opened.setup.retriever.search([question.text], topk=2)[0]
    whole = opened.setup.examiner._reading(question, both)
    less = dataclasses.replace(opened.setup.config.verify, prompt_tokens=len(whole.token_ids) - 1)
    config = dataclasses.replace(opened.setup.config, verify=less)
    prompt = dataclasses.replace(opened.setup.examiner, config=config)._reading(question, both)
    assert both[0].text in prompt.messages[0].content
    assert both[1].text not in prompt.messages[0].content


def test_a_failed_search_is_not_an_empty_one(opened):
    class Down:
        def search(self, queries, topk):
            return [(), *[None] * (len(queries) - 1)]

    examiner = dataclasses.replace(opened.setup.examiner, retriever=Down())
    how = dataclasses.replace(GREEDY, mode="rag")
    with pytest.raises(RetrievalError, match="for 4 questions, the retriever failed for 3"):
        examiner.answer(own_questions(opened), how, randomness=())


def test_samples_of_a_question_are_drawn_each_for_itself(opened):
    how = dataclasses.replace(GREEDY, samples=3, temperature=1.0)
    (group, *_) = groups = played(opened, own_questions(opened), how)
    assert [len(g.rollouts) for g in groups] == [3] * 4
    assert len({rollout.token_ids.tobytes() for rollout in group.rollouts}) > 1
    again = played(opened, own_questions(opened), how)
    assert [r.token_ids.tolist() for g in groups for r in g.rollouts] == [
        r.token_ids.tolist() for g in again for r in g.rollouts
    ]


def test_a_question_that_does_not_fit_is_told_before_anything_is_played(opened):
    long = Question(uid="nq/7", text="who " * 100, answer="x")
    with pytest.raises(PromptTooLong, match="question nq/7: .*raise config.solver.prompt_tokens"):
        played(opened, [*own_questions(opened), long], GREEDY)


def test_progress_counts_what_has_ended(opened, caplog):
    console = rich.console.Console(file=io.StringIO())
    with caplog.at_level("INFO", logger="sspjax.metrics"):
        how = dataclasses.replace(GREEDY, temperature=1.0)
        evaluate.examination(opened.setup, opened.state, 2, how, console, "exam")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1].startswith("exam 8/8")
    assert len(lines) <= 5


def test_a_trajectory_has_ended_when_it_answers_or_stops_acting():
    class Shown(Progress):
        def __init__(self):
            self.steps = []

        def update(self, step, accuracy=None, *, loss=None):
            self.steps.append(step)

    shown = Shown()
    watch = evaluate.watching(shown)
    for act, sampled in (
        (Act.SEARCH, True), (Act.NONE, False), (Act.ANSWER, True), (Act.NONE, True),
    ):  # fmt: skip
        empty = np.zeros(0, np.int32)
        watch("a", Turn(token_ids=empty, logprobs=empty, sampled=sampled, text="", act=act))
    assert shown.steps == [1, 2]


# Benchmarks and scores ----------------------------------------------------------------------------


def settings(**given):
    c = default()
    c.seeds.path, c.retrieval.corpus = "answers.jsonl", "corpus.jsonl"
    c.eval.update(given)
    return freeze(c)


def test_benchmarks_are_named_after_their_files(tmp_path):
    line = json.dumps({"id": "q1", "question": "who ?", "golden_answers": ["A", "B"]}) + "\n"
    (tmp_path / "nq.jsonl").write_text(line + line.replace("q1", "q2").replace("who", "what"))
    with gzip.open(tmp_path / "nq.extra.jsonl.gz", "wt") as file:
        file.write(line)
    files = tuple(str(tmp_path / name) for name in ("nq.jsonl", "nq.extra.jsonl.gz"))
    read = benchmarks(settings(benchmarks=files, questions=1), tmp_path)
    assert {name: [q.uid for q in own] for name, own in read.items()} == {
        "nq": ["nq/q1"],
        "nq.extra": ["nq.extra/q1"],
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "nq.jsonl").write_text(line)
    files = (str(tmp_path / "nq.jsonl"), str(tmp_path / "other" / "nq.jsonl"))
    with pytest.raises(ConfigError, match="two files of one name"):
        benchmarks(settings(benchmarks=files), tmp_path)


def test_without_files_a_run_without_a_world_has_no_benchmark(tmp_path):
    assert benchmarks(settings(), tmp_path) == {}


def group(answers: Sequence[str | None], correct: Sequence[bool | None]) -> Group:
    question = Question(uid="q", text="who ?", answer="Ada Lovelace", aliases=("Countess",))
    ids = np.zeros(1, np.int32)
    prompt = Prompt(role=Role.SOLVER, subject=question, group="q", messages=(), token_ids=ids)

    def rollout(answer: str | None, right: bool | None) -> Trajectory:
        act = Act.NONE if answer is None else Act.ANSWER
        turn = Turn(
            token_ids=ids, logprobs=ids, sampled=True, text="", act=act, argument=answer or ""
        )
        stop = Stop.TOOL_FAILED if right is None and answer is None else Stop.ANSWER
        return Trajectory(uid="q", prompt=prompt, turns=(turn,), stop=stop, policy_step=0)

    rollouts = tuple(map(rollout, answers, correct))
    return Group(question=question, rollouts=rollouts, correct=tuple(correct))


def test_scores_are_means_over_questions_of_means_over_judged_samples():
    groups = [
        # F1 1; "Ada" has precision 1 and recall 1/2: F1 2/3. Half of the samples are right.
        group(["the Countess", "Ada"], [True, False]),
        # The second sample was not judged: it is neither wrong nor right.
        group(["Ada Lovelace", None], [True, None]),
        group([None, "nobody"], [False, False]),
        group([None, None], [None, None]),
    ]
    em, f1 = (0.5 + 1 + 0) / 3, ((1 + 2 / 3) / 2 + 1 + 0) / 3
    assert score(groups) == {
        "em": pytest.approx(100 * em),
        "f1": pytest.approx(100 * f1),
        "count": 3,
        "unjudged": 1,
    }


def test_verdicts_are_a_score_of_their_own():
    """A judge that says yes to another wording, and gives no verdict on the last answer."""
    groups = [
        group(["the Countess", "Ada"], [True, True]),
        group(["nobody", None], [False, None]),
        group(["somebody"], [None]),
    ]
    scores = score(groups, judged=True)
    assert scores == {
        "em": pytest.approx(100 * (0.5 + 0 + 0) / 3),
        "f1": pytest.approx(100 * ((1 + 2 / 3) / 2 + 0 + 0) / 3),
        "judge": pytest.approx(100 * (1 + 0) / 2),
        "judge_lost": 1,
        "count": 3,
        "unjudged": 0,
    }
    summary = summarise({"nq": scores, "popqa": score(groups[:1], judged=True)})
    assert summary["judge_avg"] == 75.0
    row = metrics_row(summary)
    assert (row["eval/nq/judge"], row["eval/popqa/judge"], row["eval/avg/judge"]) == (50, 100, 75)
    screen = io.StringIO()
    rich.console.Console(file=screen, width=80).print(evaluate.table(summary))
    assert re.search(r"nq\W+16\.7\W+27\.8\W+50\.0\W+3\b", screen.getvalue())
    assert re.search(r"mean, all\W+33\.3\W+75\.0\b", screen.getvalue())


def test_what_nobody_judged_is_not_wrong():
    """As when the search engine was down throughout."""
    lost = score([group([None, None], [None, None])])
    assert lost == {"em": None, "f1": None, "count": 0, "unjudged": 1}
    summary = summarise({"nq": lost, "popqa": score([group(["the Countess"], [True])])})
    assert (summary["general_avg"], summary["multihop_avg"], summary["avg"]) == (100.0, None, 100.0)
    assert metrics_row(summary) == {"eval/popqa/em": 100.0, "eval/avg/em": 100.0}
    assert metrics_row(summarise({"nq": lost})) == metrics_row(summarise({})) == {}
    screen = io.StringIO()
    rich.console.Console(file=screen, width=80).print(evaluate.table(summary))
    assert re.search(r"nq\W+none\W+none\W+0\b", screen.getvalue())


def test_averages_are_over_the_benchmarks_of_a_kind():
    em = {"nq": 40.0, "popqa": 20.0, "musique": 10.0, "mine": 90.0}
    summary = summarise({name: {"em": value, "f1": 0.0, "count": 1} for name, value in em.items()})
    assert summary["general_avg"] == 30.0
    assert summary["multihop_avg"] == 10.0
    assert summary["avg"] == 40.0
    assert summarise({})["avg"] is None


@pytest.mark.skipif("SSPJAX_DATA" not in os.environ, reason="SSPJAX_DATA is not set")
def test_real_benchmarks_of_any_vocabulary(finished_demo, tmp_path):
    out = tmp_path / "results.json"
    files = [f"{os.environ['SSPJAX_DATA']}/questions/{n}.jsonl.gz" for n in ("nq", "bamboogle")]
    evaluate.main(
        [
            f"--workdir={finished_demo.workdir}", f"--out={out}", "--benchmarks", *files,
            "--config.eval.questions=4", "--config.solver.prompt_tokens=160",
            "--config.learner.row_tokens=288", "--mode=closed_book",
        ]
    )  # fmt: skip
    results = json.loads(out.read_text())
    assert {name: own["count"] for name, own in results["benchmarks"].items()} == {
        "nq": 4,
        "bamboogle": 4,
    }
    assert results["config"]["eval"]["benchmarks"] == files


def test_the_runs_own_config_is_the_default(finished_demo):
    here = load_config(finished_demo.config, [("batch", "8")])
    assert recorded_config(finished_demo.workdir, [("batch", "8")]) == here
