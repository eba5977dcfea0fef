"""Whole runs of the miniature, each started by the real command in processes of its own."""

import collections
import dataclasses
import re
import shutil

import numpy as np
import pytest
from miniature import Miniature, assert_same_run, config
from processes import run_processes

from sspjax.checkpoint import Checkpoints
from sspjax.mesh import train_layout
from sspjax.models.presets import preset
from sspjax.trainer import Trainer
from sspjax.workdir import Workdir

PROGRAMS = ("update", "_extend", "_copy", "_decode")


@dataclasses.dataclass(frozen=True)
class Logged:
    run: Miniature
    log: str


@pytest.fixture(scope="module")
def straight(taught, tmp_path_factory):
    """Four steps in one go, on one device."""
    run = taught.copy(tmp_path_factory.mktemp("straight") / "run")
    return Logged(run, run.train({"steps": 4}, JAX_LOG_COMPILES="1"))


def changes(run, settings, after):
    """Parameters by path: (at step 0, after `after` steps)."""
    start, end = run.saved(settings, 0)[0], run.saved(settings, after)[0]
    return {path: (start[path], end[path]) for path in start if ".params" in path}


# One run ------------------------------------------------------------------------------------------


def test_the_miniature_plays_every_part_of_a_step(straight):
    """Without this the other tests of this file could pass on empty steps."""
    rows, played = straight.run.rows()[1:], straight.run.trajectories()
    assert [row["step"] for row in rows] == sorted(played) == [1, 2, 3, 4]
    for name in ("accepted", "rejected/no_question", "rejected/leak", "rejected/verify_wrong"):
        assert sum(row[f"selfplay/{name}"] for row in rows) > 0, name
    assert sum(row["selfplay/replayed"] for row in rows) > 0
    records = [record for step in played.values() for record in step]
    assert {record["role"] for record in records} == {"proposer", "solver", "reader"}
    solvers = [record for record in records if record["role"] == "solver"]
    assert {record["correct"] for record in solvers} == {True, False}
    assert any(record["advantage"] for record in solvers)
    assert any(record["advantage"] for record in records if record["role"] == "proposer")
    assert any(turn["documents"] for record in solvers for turn in record["turns"])
    assert all(row["actor/updates"] > 0 for row in rows)
    assert all((a != b).any() for a, b in changes(straight.run, {}, 4).values())


def test_sampler_and_trainer_agree_on_every_logprob(straight):
    """Both are log softmax(logits / T) in f32: their mean difference is rounding."""
    for row in straight.run.rows()[1:]:
        assert abs(row["rollout_corr/kl"]) < 1e-6
        assert abs(row["actor/ppo_kl"]) < 1e-6
        assert row["actor/entropy"] > 0.1


def test_two_steps_and_two_more_are_four_steps(straight, taught, tmp_path):
    run = taught.copy(tmp_path / "run")
    run.train({"steps": 2})
    assert len(run.rows()) == 3
    log = run.train({"steps": 4})
    assert "resumed at step 2" in log
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3, 4]
    assert_same_run(run, straight.run, {})


def test_a_finished_run_that_is_run_again_changes_nothing(straight, tmp_path):
    run = straight.run.copy(tmp_path / "run")
    run.train({"steps": 4})
    assert run.rows() == straight.run.rows()
    assert_same_run(run, straight.run, {})


def test_nothing_compiles_after_the_first_step(straight):
    """Evaluation runs after steps 2 and 4, a checkpoint is written after each."""
    rows = straight.run.rows()[1:]
    assert ["eval/avg/em" in row for row in rows] == [False, True, False, True]
    assert rows[0]["perf/compiles"] > 0
    assert [row["perf/compiles"] for row in rows[1:]] == [0, 0, 0]
    first, later = straight.log.split("self-play 1/4")
    compiled = collections.Counter(re.findall(r"Finished XLA compilation of jit\((\w+)\)", first))
    assert {name: compiled[name] for name in PROGRAMS} == dict.fromkeys(PROGRAMS, 1)
    assert "self-play 4/4" in later
    assert "compilation" not in later


# Meshes -------------------------------------------------------------------------------------------

# What rounding may do in two steps of f32 on CPU: to a log-probability, and to a parameter tensor
# as a share of how far it moved (measured: 6e-6 and 2e-4).
LOGPROB_BOUND = 5e-5
PARAMETER_BOUND = 1e-3


def assert_same_play(run, straight, steps):
    """The same tokens, acts, documents, rewards and truth; parameters within rounding."""
    for step in range(1, steps + 1):
        mine, theirs = run.trajectories()[step], straight.trajectories()[step]
        assert [_without_logprobs(r) for r in mine] == [_without_logprobs(r) for r in theirs]
        for a, b in zip(mine, theirs, strict=True):
            for turn, other in zip(a["turns"], b["turns"], strict=True):
                np.testing.assert_allclose(
                    turn["logprobs"], other["logprobs"], rtol=0, atol=LOGPROB_BOUND
                )
    ends = run.saved({}, steps)[0]
    for path, (start, end) in changes(straight, {}, steps).items():
        moved = np.linalg.norm(end - start)
        assert moved > 0
        assert np.linalg.norm(ends[path] - end) <= PARAMETER_BOUND * moved, path


def _without_logprobs(record):
    turns = [{k: v for k, v in turn.items() if k != "logprobs"} for turn in record["turns"]]
    return {**record, "turns": turns}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.data": 1, "mesh.fsdp": 8},
        {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2},
    ],
    ids=["fsdp8", "fsdp4-tensor2"],
)
def test_eight_devices_play_as_one(straight, taught, tmp_path, mesh):
    run = taught.copy(tmp_path / "run")
    run.train({"steps": 2, **mesh}, devices=8)
    assert_same_play(run, straight.run, 2)
    assert run.rows()[2]["perf/compiles"] == 0


@pytest.mark.multiprocess
def test_two_processes_play_as_one(straight, taught, tmp_path):
    """Each process plays its half of the groups on its own two devices."""
    run = taught.copy(tmp_path / "run")
    settings = {"steps": 2, "mesh.data": 2, "mesh.fsdp": 2}
    run_processes(
        ["-m", "sspjax.train", *run.arguments(settings)],
        count=2,
        devices=2,
        timeout=300,
        environment=run.environment(),
    )
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    assert_same_play(run, straight.run, 2)
    assert run.rows()[2]["perf/compiles"] == 0


# The learner's other ways -------------------------------------------------------------------------


def test_the_papers_learner_resumes_with_its_reference(taught, tmp_path):
    """KL to the frozen start, old log-probabilities anew for each role, two solver minibatches."""
    paper = {
        "learner.order": "solver_first",
        "learner.old_logprobs": "role_start",
        "learner.minibatches.solver": 2,
        "learner.kl": 0.01,
    }
    once, twice = taught.copy(tmp_path / "once"), taught.copy(tmp_path / "twice")
    once.train({"steps": 2, **paper}, "--force")
    for steps in (1, 2):
        twice.train({"steps": steps, **paper}, "--force")
    assert_same_run(twice, once, paper)
    row = once.rows()[2]
    assert row["actor/updates"] == 3
    # Against the start of self-play; against the parameters it resumed with it would be rounding.
    assert row["actor/kl_loss"] > 1e-4


def test_tries_and_corrections_resume(taught, tmp_path):
    """Resampled places, greedy baselines, divergence in the reward, two epochs, GSPO, weights."""
    settings = {
        "shortfall.strategy": "resample",
        "shortfall.max_attempts": 3,
        "solver.estimator": "remax",
        "learner.order": "proposer_first",
        "learner.old_logprobs": "role_start",
        "learner.loss": "gspo",
        "learner.epochs": 2,
        "learner.kl_reward": 0.05,
        "learner.importance": "sequence",
        "learner.rejection": "token",
        "learner.warmup_unit": "call",
        "learner.proposer_warmup": 1,
    }
    once, twice = taught.copy(tmp_path / "once"), taught.copy(tmp_path / "twice")
    once.train({"steps": 3, **settings}, "--force")
    for steps in (1, 3):
        twice.train({"steps": steps, **settings}, "--force")
    assert_same_run(twice, once, settings)
    rows, played = once.rows()[1:], once.trajectories()
    assert sum(row["selfplay/discarded"] for row in rows) > 0
    proposers = [r for r in played[1] if r["role"] == "proposer"]
    assert len(proposers) == 8 + rows[0]["selfplay/discarded"]
    assert any("/try2/" in r["uid"] for r in proposers)
    assert len({r["uid"] for step in played.values() for r in step}) == sum(
        map(len, played.values())
    )
    # Alone in its first step, at the rate 0 of the first call, twice; then both roles, twice.
    assert [row["actor/updates"] for row in rows] == [2, 4, 4]
    assert [row["perf/compiles"] for row in rows[1:]] == [0, 0]
    start, first = once.saved(settings, 0)[0], once.saved(settings, 1)[0]
    assert all((start[p] == first[p]).all() for p in start if ".params" in p)
    terms = [r["terms"]["kl"] for r in played[3] if r["terms"]]
    assert max(map(abs, terms)) > 1e-4
    # The parameters are the start's in steps 1 and 2: what is left is rounding.
    assert max(abs(r["terms"]["kl"]) for r in played[2] if r["terms"]) < 1e-4
    assert all(0.9 < row["rollout_corr/rollout_is_mean"] < 1.1 for row in rows)


def test_other_estimators_play(taught, tmp_path):
    settings = {
        "steps": 2,
        "shortfall.strategy": "dummy",
        "verify.noise_unit": "blob",
        "verify.prompt_tokens": 200,
        "proposer.estimator": "reinforce_pp",
        "proposer.std": "sample",
        "proposer.rewards": "bell",
        "proposer.invalid": "exclude",
        "solver.estimator": "rloo",
        "learner.loss": "cispo",
        "learner.mini_epochs": 2,
    }
    run = taught.copy(tmp_path / "run")
    run.train(settings, "--force")
    rows, played = run.rows()[1:], run.trajectories()
    for row, records in zip(rows, played.values(), strict=True):
        assert row["selfplay/accepted"] + row["selfplay/dummies"] == 8
        proposers = [r for r in records if r["role"] == "proposer"]
        assert all((r["reward"] is None) == (r["reason"] is not None) for r in proposers)
        dummies = [r for r in records if "/dummy/again1/" in r["uid"]]
        assert len(dummies) == 4 * row["selfplay/dummies"]
        for group in {r["group"] for r in records if r["role"] == "solver"}:
            own = [r["advantage"] for r in records if r["group"] == group]
            assert abs(sum(own)) < 1e-9
    # The record is that of the last time the questions were played.
    solvers = [r for records in played.values() for r in records if r["role"] == "solver"]
    assert all("/again1/" in r["uid"] for r in solvers)
    assert sum(row["selfplay/dummies"] for row in rows) > 0
    assert sum(row["actor/updates"] for row in rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("old", ["behaviour", "step_start", "role_start"])
def test_the_proposer_first(taught, tmp_path, old):
    run = taught.copy(tmp_path / "run")
    run.train(
        {"steps": 1, "learner.order": "proposer_first", "learner.old_logprobs": old}, "--force"
    )
    row = run.rows()[1]
    assert row["selfplay/accepted"] > 0
    assert row["actor/updates"] == 2
    # The solver's minibatch meets parameters that the proposer's has changed. Only at the start of
    # its own role are they what its ratio is taken against.
    assert abs(row["proposer/actor/ppo_kl"]) < 1e-6
    assert (abs(row["solver/actor/ppo_kl"]) < 1e-6) == (old == "role_start")


def test_two_policies_learn_apart(taught, tmp_path):
    """Both start as the taught one; each learns its own role only."""
    apart = {"proposer.policy": "proposer", "solver.policy": "solver"}
    apart |= {"learner.order": "solver_first"}
    run = taught.copy(tmp_path / "run")
    folder = Workdir(run.workdir).checkpoints("self_play")
    own = config(run.settings({}))
    trainer = Trainer(own, preset(own.model.preset, own.model.vocab_size), train_layout(own.mesh))
    with Checkpoints(folder, 1) as checkpoints:
        state, host = checkpoints.restore(0, trainer.abstract())
    shutil.rmtree(folder)
    both = {name: state.policies["policy"] for name in ("proposer", "solver")}
    with Checkpoints(folder, 8) as checkpoints:
        checkpoints.save(0, state.replace(policies=both), host)

    run.train({"steps": 2, **apart}, "--force")
    assert sum(row["selfplay/accepted"] for row in run.rows()[1:]) > 0
    moved = {path: (b - a) for path, (a, b) in changes(run, apart, 2).items()}
    policies = {name: {k: v for k, v in moved.items() if f"['{name}']" in k} for name in both}
    proposer, solver = policies["proposer"].values(), policies["solver"].values()
    assert len(proposer) == len(solver) == len(moved) / 2 > 0
    assert all(
        a.any() and b.any() and (a != b).any() for a, b in zip(proposer, solver, strict=True)
    )
