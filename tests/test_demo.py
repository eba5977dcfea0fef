"""`python -m sspjax.demo`, run to its end, read, and run again."""

import dataclasses
import io
import json
import shutil
import time

import numpy as np
import pytest
import rich.console

from sspjax import demo
from sspjax.command_line import UserError, load_config
from sspjax.types import Group, Question


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_summary_is_the_contract(finished_demo):
    summary = json.loads((finished_demo.workdir / "summary.json").read_text())
    assert list(summary) == [
        "seed", "steps", "before", "after", "oracle_correct_rate", "oracle_verified_rate",
        "oracle_count", "valid_question_rate", "two_search_rate", "seconds", "cpu_seconds",
    ]  # fmt: skip
    assert (summary["seed"], summary["steps"]) == (0, 2)
    for when in ("before", "after"):
        own = summary[when]
        assert list(own) == ["avg_em", "onehop_em", "twohop_em", "sampled_em", "count"]
        assert own["avg_em"] == (own["onehop_em"] + own["twohop_em"]) / 2
        assert own["count"] == 8
    for kind in ("seconds", "cpu_seconds"):
        assert list(summary[kind]) == ["install", "warm_start", "self_play", "evaluate"]
        assert all(summary[kind][phase] > 0 for phase in ("warm_start", "self_play", "evaluate"))
    # The installation came before, if there was one.
    run = sum(seconds for phase, seconds in summary["seconds"].items() if phase != "install")
    assert run < finished_demo.seconds


def test_summary_agrees_with_what_self_play_wrote(finished_demo):
    summary = json.loads((finished_demo.workdir / "summary.json").read_text())
    rows = {row["step"]: row for row in rows_of(finished_demo.workdir / "metrics.jsonl")}
    for when, step in (("before", 0), ("after", 2)):
        assert summary[when]["onehop_em"] == rows[step]["eval/1hop/em"]
        assert summary[when]["twohop_em"] == rows[step]["eval/2hop/em"]
    played = [rows[1], rows[2]]
    valid = [row["selfplay/valid_question_rate"] for row in played]
    assert summary["valid_question_rate"] == pytest.approx(np.mean(valid))
    accepted = sum(row["selfplay/accepted"] for row in played)
    assert summary["oracle_count"] == accepted == 4 * sum(valid)


def test_it_shows_numbers_a_question_and_where_to_look(finished_demo):
    shown = finished_demo.stdout
    for words in ("before", "after", "EM, two hops", "EM, mean at temperature 1", "self play, s"):
        assert words in shown
    told = shown[shown.index("before self-play") :]
    assert "    search: " in told
    assert "    found: " in told
    assert "after self-play" in told
    assert f"python -m sspjax.ask --workdir={finished_demo.workdir} '" in told


def test_run_again_it_shows_the_same_and_trains_no_more(finished_demo, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished_demo.workdir, workdir)
    before = json.loads((workdir / "summary.json").read_text())
    screen = io.StringIO()
    config = load_config(finished_demo.config)
    # Eight devices here, one there.
    after = demo.demo(config, workdir, rich.console.Console(file=screen, width=200))
    assert "EM, one hop" in screen.getvalue()
    assert json.loads((workdir / "summary.json").read_text()) == after
    for kind in ("seconds", "cpu_seconds"):
        before[kind].pop("evaluate"), after[kind].pop("evaluate")
    assert after == before
    assert len(rows_of(workdir / "metrics.jsonl")) == 3


def test_rates_are_pooled_over_the_last_ten_steps_by_the_questions_they_are_about():
    first = {
        "step": 1,
        "selfplay/valid_question_rate": 1.0,
        "selfplay/accepted": 1000,
        "selfplay/two_search_rate": 0.0,
        "selfplay/oracle_count": 1000,
        "selfplay/oracle_correct_rate": 0.0,
        "selfplay/oracle_verified_rate": 0.0,
    }
    none = {
        "selfplay/valid_question_rate": 0.0,
        "selfplay/accepted": 0,
        "selfplay/two_search_rate": 0.0,
        "selfplay/oracle_count": 0,
    }
    last = {
        "step": 11,
        "selfplay/valid_question_rate": 0.5,
        "selfplay/accepted": 3,
        "selfplay/two_search_rate": 1 / 3,
        "selfplay/oracle_count": 3,
        "selfplay/oracle_correct_rate": 2 / 3,
        "selfplay/oracle_verified_rate": 3 / 4,
        "selfplay/rejected/consensus": 1,
    }
    tenth = {**last, "step": 10, "selfplay/accepted": 1, "selfplay/two_search_rate": 1.0}
    tenth |= {"selfplay/oracle_count": 1, "selfplay/oracle_correct_rate": 0.0}
    tenth |= {"selfplay/oracle_verified_rate": 0.0, "selfplay/rejected/consensus": 0}
    rows = [{"step": 0, "eval/avg/em": 1.0}, first]
    rows += [{"step": step, **none} for step in range(2, 10)]
    rates = demo.rates([*rows, tenth, last])
    assert rates == {
        "oracle_correct_rate": pytest.approx((0 * 1 + 2) / 4),
        "oracle_verified_rate": pytest.approx((0 * 1 + 3) / 5),
        "oracle_count": 4,
        "valid_question_rate": pytest.approx((8 * 0.0 + 0.5 + 0.5) / 10),
        "two_search_rate": pytest.approx((1 + 1) / 4),
    }


def test_rates_of_nothing_are_null():
    assert demo.rates([{"step": 0}]) == {
        "oracle_correct_rate": None,
        "oracle_verified_rate": None,
        "oracle_count": 0,
        "valid_question_rate": None,
        "two_search_rate": None,
    }


def test_time_adds_up_over_starts_and_a_failed_phase_counts(tmp_path):
    path = tmp_path / "demo.json"
    with pytest.raises(RuntimeError), demo.Spent(path).on("warm_start"):
        time.sleep(0.02)
        raise RuntimeError
    spent = demo.Spent(path)
    with spent.on("warm_start"):
        time.sleep(0.02)
    with spent.on("evaluate"):
        pass
    again = demo.Spent(path)
    assert again.numbers()["seconds"]["warm_start"] >= 0.04
    assert again.numbers()["seconds"]["self_play"] is None
    assert again.numbers()["seconds"]["evaluate"] is not None
    again.forget("evaluate")
    assert again.numbers()["cpu_seconds"]["evaluate"] is None


def test_the_installation_is_read_from_its_stamp(tmp_path):
    assert demo.installation(tmp_path) == {"seconds": None, "cpu_seconds": None}
    stamp = {"seconds": 61.5, "user_seconds": 30.0, "system_seconds": 4.5}
    (tmp_path / "install.json").write_text(json.dumps(stamp))
    assert demo.installation(tmp_path) == {"seconds": 61.5, "cpu_seconds": 34.5}


def test_the_question_told_is_one_that_was_learnt():
    def group(name, correct):
        question = Question(uid=name, text=name, answer="x")
        return Group(question=question, rollouts=(), correct=(correct,))

    before = [group("a", True), group("b", False), group("c", False), group("d", False)]
    after = [group("a", True), group("b", True), group("c", True), group("d", False)]
    assert demo.telling(before, after)[0].question.uid == "c"
    assert demo.telling(before, before)[0].question.uid == "d"


@pytest.mark.parametrize(
    "overrides", [[("warm_start.steps", "0")], [("world.hops", "1")]], ids=["no warm start", "hops"]
)
def test_it_needs_a_warm_start_and_two_hops(finished_demo, tmp_path, overrides):
    config = load_config(finished_demo.config, overrides)
    with pytest.raises(UserError, match="the demo compares"):
        demo.demo(config, tmp_path / "run", rich.console.Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_what_is_left_to_do_is_read_from_the_checkpoints(finished_demo):
    config = load_config(finished_demo.config)
    workdir = demo.Workdir(finished_demo.workdir)
    assert demo.unfinished(config, workdir) == ["evaluate"]
    longer = dataclasses.replace(config, steps=3)
    assert demo.unfinished(longer, workdir) == ["self_play", "evaluate"]
    nowhere = demo.Workdir(finished_demo.workdir / "nowhere")
    assert demo.unfinished(config, nowhere) == ["warm_start", "self_play", "evaluate"]
