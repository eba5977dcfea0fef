import json
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import ROOT, python_environment, run_processes

from sspjax.checkpoint import CheckpointError, Checkpoints
from sspjax.types import PolicyState, TrainState

TMP = "*.orbax-checkpoint-tmp*"
OLD = ROOT / "tests" / "old_checkpoints"


def mesh_of(*shape):
    names = ("data", "fsdp", "tensor")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def train_state(seed=0, rows=64):
    """A sharded state with everything a real one has: bf16, integers, optimizer tuples."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(8)
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params = {
        "layers": {"w": jax.device_put(rng.normal(size=(rows, 32)).astype(np.float32), split)},
        "scale": jax.device_put(rng.normal(size=(5,)).astype(jnp.bfloat16), whole),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = jax.jit(tx.init)(params)
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(seed + 1, x.dtype), opt_state)
    step = jax.device_put(np.int32(seed), whole)
    policy = PolicyState(params=params, opt_state=opt_state)
    return TrainState(step=step, policies={"policy": policy})


def abstract(state, mesh=None, spec=lambda x: PartitionSpec()):
    mesh = mesh or mesh_of(8)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))),
        state,
    )


def assert_bits_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def test_a_state_comes_back_bit_for_bit_on_another_mesh(tmp_path):
    state = train_state()
    host = {"seed_cursor": 7, "replay": [{"text": "é?"}], "last_row": {"a": 0.1, "b": float("nan")}}
    with Checkpoints(tmp_path / "self_play", keep=2) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(5, state, host)
    mesh = mesh_of(2, 4)
    form = abstract(state, mesh, lambda x: PartitionSpec(*("fsdp", "data")[: max(x.ndim - 1, 0)]))
    with Checkpoints(tmp_path / "self_play", keep=2) as checkpoints:
        assert checkpoints.latest() == 5
        restored, found = checkpoints.restore(5, form)
    assert_bits_equal(restored, state)
    assert json.dumps(found) == json.dumps(host)
    w = restored.policies["policy"].params["layers"]["w"]
    assert w.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("fsdp")), 2)


def test_the_last_ones_are_kept(tmp_path):
    state = {"w": jnp.zeros(4)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (0, 1, 5, 9):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [5, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "9"]


def test_phases_have_their_own_steps(tmp_path):
    with (
        Checkpoints(tmp_path / "warm_start", keep=1) as warm_start,
        Checkpoints(tmp_path / "self_play", keep=1) as self_play,
    ):
        warm_start.save(80, {"w": jnp.ones(4)}, {"phase": "warm start"})
        self_play.save(0, {"w": jnp.zeros(4)}, {"phase": "self-play"})
        warm_start.wait()
        self_play.wait()
        assert (warm_start.latest(), self_play.latest()) == (80, 0)
        assert warm_start.restore(80, abstract({"w": jnp.ones(4)}))[1] == {"phase": "warm start"}


def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda w: w + 1, state), donate_argnums=0)
    sharding = NamedSharding(mesh_of(8), PartitionSpec("data"))
    state = {f"w{i}": jax.device_put(np.zeros((64, 1024), np.float32), sharding) for i in range(4)}
    form = abstract(state)
    host = {"steps": [0]}
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state, host)
            host["steps"].append(step + 1)
            for _ in range(5):
                state = advance(state)
        checkpoints.wait()
        for step in range(4):
            restored, found = checkpoints.restore(step, form)
            assert found == {"steps": list(range(step + 1))}
            for w in restored.values():
                np.testing.assert_array_equal(w, np.float32(5 * step))


def test_parameters_can_be_read_without_their_optimizer(tmp_path):
    state = train_state()
    form = abstract(state)
    policy = form.policies["policy"].replace(opt_state=None)
    partial = form.replace(policies={"policy": policy})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, partial, partial=True)
        assert_bits_equal(restored.policies["policy"].params, state.policies["policy"].params)
        assert restored.policies["policy"].opt_state is None
        with pytest.raises(CheckpointError, match="opt_state.*expected nothing"):
            checkpoints.restore(1, partial)


def test_a_state_that_does_not_fit_is_named_leaf_by_leaf(tmp_path):
    state = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.bfloat16), "c": jnp.zeros(1)}
    other = {"a": jnp.zeros((2, 4)), "b": jnp.zeros(4), "d": jnp.zeros(1)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(1, abstract(other))
    message = str(caught.value)
    assert "a: expected float32[2,4], saved float32[2,3]" in message
    assert "b: expected float32[4], saved bfloat16[4]" in message
    assert "c: expected nothing, saved float32[1]" in message
    assert "d: expected float32[1], saved nothing" in message


def test_a_checkpoint_of_the_first_format_still_restores():
    """Written once, when FORMAT was 1, and never again; a later format reads it or drops this."""
    whole = NamedSharding(mesh_of(8), PartitionSpec())

    def form(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    params = {"embedding": form((4, 3), np.float32), "q": form((8,), jnp.bfloat16)}
    opt_state = jax.tree.map(
        lambda x: form(x.shape, x.dtype), jax.eval_shape(optax.adamw(1e-3).init, params)
    )
    policies = {"policy": PolicyState(params=params, opt_state=opt_state)}
    wanted = TrainState(step=form((), np.int32), policies=policies)
    with Checkpoints(OLD / "format_1", 1, read_only=True) as checkpoints:
        state, host = checkpoints.restore(5, wanted)
    found = state.policies["policy"].params
    assert (int(state.step), host) == (5, {"seed_cursor": 3})
    assert np.array_equal(found["embedding"], np.arange(12).reshape(4, 3) / 8)
    assert np.array_equal(found["q"], np.arange(8) / 4)
    assert not any(np.any(x) for x in jax.tree.leaves(state.policies["policy"].opt_state))


def test_another_format_is_refused(tmp_path, monkeypatch):
    state = {"w": jnp.zeros(4)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        monkeypatch.setattr("sspjax.checkpoint.FORMAT", 2)
        with pytest.raises(CheckpointError, match="format 1, this version reads 2"):
            checkpoints.restore(1, abstract(state))


def test_wrong_calls_say_what_is_there(tmp_path):
    state = {"w": jnp.zeros(4)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state, {})
        with pytest.raises(CheckpointError, match="step 1 is already saved"):
            checkpoints.save(1, state, {})
        with pytest.raises(TypeError):
            checkpoints.save(2, state, {"not": {1, 2}})
        with pytest.raises(CheckpointError, match=r"of step 2; there are \[1\]"):
            checkpoints.restore(2, abstract(state))
        checkpoints.save(2, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_a_roll_back_forgets_what_came_after(tmp_path):
    form = abstract({"w": jnp.zeros(4)})
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": jnp.full(4, float(step))}, {"attempt": 0})
        checkpoints.drop_after(2)
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, {"w": jnp.full(4, 30.0)}, {"attempt": 1})
        checkpoints.wait()
        restored, host = checkpoints.restore(3, form)
    assert host == {"attempt": 1}
    np.testing.assert_array_equal(restored["w"], np.full(4, 30.0, np.float32))


def test_looking_does_not_touch(tmp_path):
    state = {"w": jnp.zeros(4)}
    with Checkpoints(tmp_path / "none", keep=1, read_only=True) as checkpoints:
        assert checkpoints.latest() is None
    assert not (tmp_path / "none").exists()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {"a": 1})
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, keep=1, read_only=True) as checkpoints:
        assert checkpoints.latest() == 1
        assert checkpoints.restore(1, abstract(state))[1] == {"a": 1}
        with pytest.raises(CheckpointError, match="read-only"):
            checkpoints.save(3, state, {})
    assert list(tmp_path.glob(TMP))


@pytest.mark.parametrize("limit", ["state", "host"])
def test_a_full_disk_is_told_and_leaves_the_last_checkpoint_good(tmp_path, limit):
    """A limit on the size of files makes the real writes fail, as a full disk would."""
    state = {"w": jax.device_put(np.random.default_rng(0).normal(size=(256, 64)))}
    host = {"text": "x" * 200_000 if limit == "host" else ""}
    size = {"state": 10_000, "host": 150_000}[limit]
    form = abstract(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {"n": 1})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(CheckpointError) as caught:
                checkpoints.save(2, state, host)
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    checkpoints.poll()
                    time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        message = str(caught.value)
        assert "saving step 2 failed" in message
        assert "File too large" in message
        assert "step 1, is untouched" in message
        checkpoints.poll()
        assert checkpoints.latest() == 1
        restored, found = checkpoints.restore(1, form)
        assert found == {"n": 1}
        assert_bits_equal(restored, state)
        # With room again the run could go on.
        checkpoints.save(3, state, {"n": 3})
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, state, {})
    assert not list(tmp_path.glob(TMP))


def kill_in_the_middle(folder, delay):
    """Starts the saving program, kills it `delay` seconds into a save; True if that cut it off."""
    first = max((int(p.name) for p in folder.glob("[0-9]*") if p.name.isdigit()), default=0)
    child = subprocess.Popen(
        [sys.executable, "tests/programs/save_until_killed.py", str(folder)],
        cwd=ROOT,
        env=python_environment(8),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not any((folder / str(step)).exists() for step in (first + 1, first + 2)):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        while not list(folder.glob(TMP)):
            assert child.poll() is None and time.monotonic() < deadline
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    return bool(list(folder.glob(TMP)))


def assert_every_checkpoint_is_whole(folder):
    shape = jax.ShapeDtypeStruct(
        (64, 128), np.float32, sharding=NamedSharding(mesh_of(8), PartitionSpec("data"))
    )
    with Checkpoints(folder, keep=2, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        assert steps
        for step in steps:
            state, host = checkpoints.restore(step, {f"w{i}": shape for i in range(8)})
            assert host["seed_cursor"] == step
            for w in state.values():
                np.testing.assert_array_equal(w, np.float32(step))
    return steps[-1]


def kill_and_look(folder, delays):
    cut_off, last = [], 0
    for delay in delays:
        cut_off.append(kill_in_the_middle(folder, delay))
        latest = assert_every_checkpoint_is_whole(folder)
        assert latest > last
        last = latest
    assert any(cut_off), "no kill fell into a save: the test showed nothing"


def test_a_run_killed_while_saving_finds_its_last_step_whole(tmp_path):
    kill_and_look(tmp_path, (0.0, 0.004, 0.012))


@pytest.mark.slow
def test_a_run_killed_at_any_moment_finds_its_last_step_whole(tmp_path):
    kill_and_look(tmp_path, np.random.default_rng(0).uniform(0.0, 0.05, size=25))


@pytest.mark.multiprocess
def test_two_processes_save_one_checkpoint(tmp_path):
    reports = run_processes(["tests/programs/save_from_two.py", str(tmp_path)], count=2, devices=2)
    for report in reports:
        assert report == {
            "before": None,
            "kept": [2, 3],
            "left": [2],
            "right": True,
            "host": {"written_by": 0},
        }
    form = {
        "w": jax.ShapeDtypeStruct(
            (4, 8), np.float32, sharding=NamedSharding(mesh_of(8), PartitionSpec(None, "data"))
        )
    }
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        restored, host = checkpoints.restore(2, form)
    assert host == {"written_by": 0}
    np.testing.assert_array_equal(restored["w"], np.arange(32, dtype=np.float32).reshape(4, 8) + 2)
