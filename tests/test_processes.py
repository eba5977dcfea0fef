import hashlib

import jax
import pytest
from processes import run_processes

from sspjax import processes


@pytest.fixture
def joined(monkeypatch):
    """Records what `initialize` asks of JAX instead of joining a group."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    return calls


def test_alone_by_default(joined):
    processes.initialize({"SLURM_STEP_NUM_TASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"})
    assert joined == []


def test_three_variables_name_the_group(joined):
    processes.initialize(
        {
            "SSPJAX_COORDINATOR": "[::1]:4000",
            "SSPJAX_PROCESS_ID": "1",
            "SSPJAX_NUM_PROCESSES": "3",
            "SLURM_STEP_NUM_TASKS": "8",
        }
    )
    (call,) = joined
    assert call["coordinator_address"] == "[::1]:4000"
    assert (call["process_id"], call["num_processes"]) == (1, 3)
    assert call["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize(
    "environ",
    [
        {"SSPJAX_DISTRIBUTED": "auto"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
)
def test_cluster_is_left_to_jax(joined, environ):
    processes.initialize(environ)
    (call,) = joined
    assert "coordinator_address" not in call and "process_id" not in call


def test_a_cluster_can_be_refused(joined):
    processes.initialize({"SLURM_STEP_NUM_TASKS": "2", "SSPJAX_DISTRIBUTED": "off"})
    assert joined == []


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SSPJAX_COORDINATOR": "a:1"}, "without SSPJAX_PROCESS_ID, SSPJAX_NUM_PROCESSES"),
        ({"SSPJAX_DISTRIBUTED": "yes"}, "expected auto, off, or nothing"),
        (
            {
                "SSPJAX_COORDINATOR": "a",
                "SSPJAX_PROCESS_ID": "0",
                "SSPJAX_NUM_PROCESSES": "1",
            },
            "expected host:port",
        ),
        (
            {
                "SSPJAX_COORDINATOR": "a:1",
                "SSPJAX_PROCESS_ID": "2",
                "SSPJAX_NUM_PROCESSES": "2",
            },
            "expected 0 <= id < number",
        ),
    ],
)
def test_wrong_variables_are_errors(joined, environ, message):
    with pytest.raises(processes.ProcessError, match=message):
        processes.initialize(environ)
    assert joined == []


def test_one_process_exchanges_with_itself():
    assert processes.exchange(b"alone") == [b"alone"]
    assert processes.is_main()
    processes.barrier("nobody to wait for")


@pytest.mark.multiprocess
def test_two_processes_exchange_payloads_of_any_length():
    rows = run_processes(["tests/programs/exchange_bytes.py"], count=2, devices=2)
    chunk = (32 << 20) // 2
    digests = [hashlib.sha256(bytes([p]) * (chunk + 7 * p)).hexdigest() for p in range(2)]
    for process, row in enumerate(rows):
        assert row["process"] == process
        assert row["main"] == (process == 0)
        assert row["devices"] == [2, 4]
        assert row["short"] == ["from 0", "from 1"]
        assert row["lengths"] == [[6, 6], [0, 1], [chunk, chunk + 7]]
        assert row["digests"] == digests
        # Two programs, the headers' and the chunk's, serve every length.
        assert row["compiles"] == [2, 0, 0, 0]


@pytest.mark.multiprocess
def test_a_failing_process_ends_the_group_with_its_output():
    program = (
        "import os, sys, time; i = os.environ['SSPJAX_PROCESS_ID']; "
        "sys.exit('broken') if i == '1' else time.sleep(60)"
    )
    with pytest.raises(AssertionError, match="(?s)process 1, exit code 1.*broken"):
        run_processes(["-c", program], count=2, devices=1)
