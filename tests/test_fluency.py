"""The gates in whole runs of the miniature, and what the fluency gate measures."""

import collections
import json
import re
import shutil

import numpy as np
import pytest
from miniature import Miniature, assert_same_run, config
from processes import run_processes
from test_train import assert_same_play

from sspjax.checkpoint import Checkpoints
from sspjax.demonstrations import proposer_demonstrations
from sspjax.fluency import DEMONSTRATIONS, question_tokens
from sspjax.mesh import train_layout
from sspjax.models.presets import preset
from sspjax.rollout.tokenizer import load_tokenizer
from sspjax.trainer import Trainer
from sspjax.types import Role
from sspjax.warm_start import training_worlds, world_scripts
from sspjax.workdir import Workdir

QUANTILE = 0.3
GATES = {
    "verify.grounded": True,
    "verify.fluency_quantile": QUANTILE,
    "verify.consensus": True,
    # The agent is right about nothing: a reader would leave the solvers nothing to outvote.
    "verify.reader": "none",
    "proposer.temperature": 0.5,
    "solver.temperature": 0.7,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Settings for a world in which every gate lets some questions pass and others not.

    The passages are those of the world that taught the agent, three of four under the title `who`,
    which is how half of its questions start. A third of the names are right answers to each seed.
    """
    folder = tmp_path_factory.mktemp("world")
    (taught,) = training_worlds(config({}))
    names = [name for entity in taught.graph.entities.values() for name in entity.names]
    seeds = [{"answer": a, "aliases": names[i % 3 :: 3], "hops": 1} for i, a in enumerate(names)]
    passages = [
        {"id": d.id, "title": "who" if i % 4 else d.title, "text": d.text}
        for i, d in enumerate(taught.documents())
    ]
    files = {"answers.jsonl": seeds, "corpus.jsonl": passages}
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"seeds.path": folder / "answers.jsonl", "retrieval.corpus": folder / "corpus.jsonl"}


@pytest.fixture(scope="module")
def gated(taught, world, tmp_path_factory):
    """Three steps behind all gates in one go, on one device, and what was logged."""
    run = taught.copy(tmp_path_factory.mktemp("gated") / "run")
    return run, run.train({"steps": 3, **GATES, **world}, "--force", JAX_LOG_COMPILES="1")


def measured(run: Miniature, settings) -> tuple[list[int], dict]:
    """The steps and the host state of a run's `reference` checkpoint."""
    own = config(run.settings(settings))
    trainer = Trainer(own, preset(own.model.preset, own.model.vocab_size), train_layout(own.mesh))
    folder = Workdir(run.workdir).checkpoints("reference")
    with Checkpoints(folder, 1, read_only=True) as saved:
        steps = saved.steps()
        return steps, saved.restore(steps[-1], trainer.abstract_reference())[1]


def told(log: str) -> float:
    """The threshold a run has logged."""
    (number,) = re.findall(r"below log-probability (\S+) are not fluent", log)
    return float(number)


def by_role(records, role):
    return [record for record in records if record["role"] == role]


# Whole runs ---------------------------------------------------------------------------------------


def test_every_gate_rejects_some_and_passes_some(gated):
    rows = gated[0].rows()[1:]
    for reason in ("not_grounded", "not_fluent", "consensus"):
        assert sum(row[f"selfplay/rejected/{reason}"] for row in rows) > 0, reason
    assert sum(row["selfplay/accepted"] for row in rows) > 0
    for row in rows:
        played = ("accepted", "replayed", "empty", "rejected/consensus")
        assert sum(row[f"selfplay/{name}"] for name in played) == 8
        # No reader: whatever reaches it passes.
        for truth in ("true", "false"):
            assert row[f"selfplay/oracle_{truth}_accepted"] == row[f"selfplay/oracle_{truth}_read"]
        read = row["selfplay/oracle_true_read"] + row["selfplay/oracle_false_read"]
        assert read == row["selfplay/accepted"] + row["selfplay/rejected/consensus"]


def test_an_outvoted_question_pays_nothing_and_is_not_replayed(gated):
    run, _ = gated
    played = run.trajectories()
    outvoted = set()
    for records in played.values():
        for record in by_role(records, "proposer"):
            if record["reason"] == "consensus":
                outvoted.add(record["question"])
                assert record["reward"] == 0
                solvers = [r for r in records if r["subject"]["uid"] == record["uid"]]
                assert len(solvers) == 4
                assert not any(r["correct"] for r in solvers)
                answers = collections.Counter(r["turns"][-1]["argument"] for r in solvers)
                assert max(answers.values()) >= 2
    assert outvoted
    accepted = {
        record["question"]
        for records in played.values()
        for record in by_role(records, "proposer")
        if record["question"] and record["reason"] is None
    }
    assert not {r["question"]["text"] for r in run.saved({})[1]["replay"]} & (outvoted - accepted)
    assert {r["question"]["text"] for r in run.saved({})[1]["replay"]} == accepted


def test_nothing_compiles_after_the_first_step_and_one_program_scores(gated):
    run, log = gated
    assert [row["perf/compiles"] for row in run.rows()[2:]] == [0, 0]
    programs = re.findall(r"Finished XLA compilation of jit\((\w+)\)", log)
    assert programs.count("reference_logprobs") == 1
    assert "compilation" not in log.split("self-play 1/3")[1]


def test_the_threshold_is_measured_once_and_kept(gated, world):
    run, log = gated
    steps, host = measured(run, world)
    assert steps == [0]
    assert len(host["fluency"]) == DEMONSTRATIONS
    assert all(x < 0 for x in host["fluency"])
    # The sorted numbers, and rank .3 x 255 = 76.5 among them.
    ranked = sorted(host["fluency"])
    assert told(log) == pytest.approx((ranked[76] + ranked[77]) / 2, abs=5e-4)


def test_one_step_and_two_more_are_three_steps(gated, taught, world, tmp_path):
    run = taught.copy(tmp_path / "run")
    first = run.train({"steps": 1, **GATES, **world}, "--force")
    resumed = run.train({"steps": 3, **GATES, **world})
    assert "resumed at step 1" in resumed
    assert_same_run(run, gated[0], {})
    assert told(first) == told(resumed) == told(gated[1])
    assert measured(run, world) == measured(gated[0], world)


def test_another_quantile_needs_no_other_measurement(gated, world, tmp_path):
    run = gated[0].copy(tmp_path / "run")
    wider = {**GATES, **world, "verify.fluency_quantile": 0.4}
    log = run.train({"steps": 3, **wider}, "--force")
    kept = measured(run, world)
    assert kept == measured(gated[0], world)
    # Rank .4 x 255 is 102.
    assert told(log) == pytest.approx(sorted(kept[1]["fluency"])[102], abs=5e-4)
    assert told(log) > told(gated[1])


def test_a_reference_kept_for_something_else_is_measured_later(gated, world, tmp_path):
    """A run with KL that is given the gate: the same start, and now its numbers too."""
    run = gated[0].copy(tmp_path / "run")
    own = config(run.settings({**world}))
    trainer = Trainer(own, preset(own.model.preset, own.model.vocab_size), train_layout(own.mesh))
    folder = Workdir(run.workdir).checkpoints("reference")
    with Checkpoints(folder, 1) as saved:
        reference, _ = saved.restore(0, trainer.abstract_reference())
    shutil.rmtree(folder)
    with Checkpoints(folder, 1) as saved:
        saved.save(0, reference, {})
    log = run.train({"steps": 3, **GATES, **world})
    assert told(log) == told(gated[1])
    assert measured(run, world) == ([1], measured(gated[0], world)[1])


def test_rejected_questions_are_not_read(taught, world, tmp_path):
    run = taught.copy(tmp_path / "run")
    run.train({"steps": 2, **GATES, **world, "verify.reader": "solver"}, "--force")
    reasons = collections.Counter()
    for records in run.trajectories().values():
        reached = {
            record["uid"]
            for record in by_role(records, "proposer")
            if record["reason"] in (None, "consensus", "verify_wrong")
        }
        assert {record["subject"]["uid"] for record in by_role(records, "reader")} == reached
        reasons.update(record["reason"] for record in by_role(records, "proposer"))
    assert reasons["not_fluent"] and reasons["not_grounded"] and reasons["verify_wrong"]


@pytest.mark.slow
def test_eight_devices_pass_the_same_questions(gated, taught, world, tmp_path):
    run = taught.copy(tmp_path / "run")
    mesh = {"mesh.data": 1, "mesh.fsdp": 8}
    run.train({"steps": 2, **GATES, **world, **mesh}, "--force", devices=8)
    assert_same_play(run, gated[0], 2)
    assert run.rows()[2]["perf/compiles"] == 0


@pytest.mark.multiprocess
def test_two_processes_pass_the_same_questions(gated, taught, world, tmp_path):
    """Each holds half of every scored row and learns the other half."""
    run = taught.copy(tmp_path / "run")
    settings = {"steps": 2, **GATES, **world, "mesh.data": 2, "mesh.fsdp": 2}
    run_processes(
        ["-m", "sspjax.train", *run.arguments(settings, "--force")],
        count=2,
        devices=2,
        timeout=300,
        environment=run.environment(),
    )
    assert_same_play(run, gated[0], 2)
    assert run.rows()[2]["perf/compiles"] == 0
    ours, theirs = measured(run, world)[1]["fluency"], measured(gated[0], world)[1]["fluency"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5)


# What is measured ---------------------------------------------------------------------------------


def test_the_demonstrations_are_fresh_and_of_the_proposer(taught):
    own = config(taught.settings({}))
    tokenizer = load_tokenizer(Workdir(taught.workdir).tokenizer)
    scripts = world_scripts(own, tokenizer)
    made = proposer_demonstrations(scripts, own.warm_start, 20, own.seed)
    again = proposer_demonstrations(world_scripts(own, tokenizer), own.warm_start, 20, own.seed)
    other = proposer_demonstrations(scripts, own.warm_start, 20, own.seed + 1)

    def ids(trajectories):
        return [t.token_ids.tolist() for t in trajectories]

    assert ids(made) == ids(again) != ids(other)
    for trajectory in made:
        assert trajectory.prompt.role is Role.PROPOSER
        own_tokens = trajectory.token_ids[question_tokens(tokenizer, trajectory)]
        said = trajectory.turns[-1].argument
        assert tokenizer.decode(own_tokens) == f" {said} </question>"
