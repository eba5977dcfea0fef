import os
import pathlib
import re
import subprocess
import time

import pytest
from processes import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh"))


def launch(script, *arguments, environment=None, timeout=30):
    return subprocess.run(
        [f"launch/{script}", *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def printed(script, *arguments):
    result = launch(script, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_parses(script):
    subprocess.run(["bash", "-n", f"launch/{script}"], cwd=ROOT, check=True)


def test_the_readme_names_every_script():
    named = set(re.findall(r"`([a-z_]+\.sh)", (ROOT / "launch" / "README.md").read_text()))
    assert named == set(SCRIPTS) - {"show.sh"}


def test_local_processes_on_cpus():
    assert printed(
        "local.sh",
        *("--dry-run", "--port", "4000", "--devices", "2"),
        *("2", "--", "--config=configs/tiny.py", "--workdir=a b"),
    ) == (
        "env SSPJAX_COORDINATOR=127.0.0.1:4000 SSPJAX_NUM_PROCESSES=2 SSPJAX_PROCESS_ID=0 "
        "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 "
        "python -m sspjax.train --config=configs/tiny.py '--workdir=a b'\n"
        "env SSPJAX_COORDINATOR=127.0.0.1:4000 SSPJAX_NUM_PROCESSES=2 SSPJAX_PROCESS_ID=1 "
        "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 "
        "python -m sspjax.train --config=configs/tiny.py '--workdir=a b'\n"
    )


def test_local_processes_share_out_the_gpus():
    lines = printed(
        "local.sh", "--dry-run", "--port", "4000", "--devices", "4", "--gpus", "2", "--", "--x"
    ).splitlines()
    assert [re.search(r"CUDA_VISIBLE_DEVICES=(\S+)", line)[1] for line in lines] == [
        "0,1,2,3",
        "4,5,6,7",
    ]
    assert "JAX_PLATFORMS" not in lines[0]


def test_tpu_pod_from_creation_to_deletion():
    pod = ("pod", "us-central1-a")
    assert printed("tpu_vm.sh", "--dry-run", "create", *pod, "v5p-64", "--spot") == (
        "gcloud compute tpus tpu-vm create pod --zone=us-central1-a "
        "--accelerator-type=v5p-64 --version=v2-alpha-tpuv5 --spot\n"
    )
    assert printed("tpu_vm.sh", "--dry-run", "setup", *pod) == (
        "git archive --format=tar.gz --output=/tmp/sspjax.tar.gz HEAD\n"
        "gcloud compute tpus tpu-vm scp /tmp/sspjax.tar.gz pod:/tmp/ "
        "--zone=us-central1-a --worker=all\n"
        "gcloud compute tpus tpu-vm ssh pod --zone=us-central1-a --worker=all "
        "'--command=mkdir -p ~/sspjax && tar -xzf /tmp/sspjax.tar.gz -C ~/sspjax && cd ~/sspjax "
        "&& python3 -m pip install --quiet --user uv "
        "&& ~/.local/bin/uv venv --quiet --allow-existing --python 3.11 .venv "
        '&& ~/.local/bin/uv pip install --quiet --python .venv/bin/python -e ".[tpu]"\'\n'
    )
    arguments = ("--", "--config=configs/ssp.py", "--workdir=/mnt/runs/1")
    assert printed("tpu_vm.sh", "--dry-run", "run", *pod, *arguments) == (
        "gcloud compute tpus tpu-vm ssh pod --zone=us-central1-a --worker=all "
        "'--command=cd ~/sspjax && { SSPJAX_DISTRIBUTED=auto "
        "JAX_COMPILATION_CACHE_DIR=~/.cache/sspjax nohup .venv/bin/python -m sspjax.train "
        "--config=configs/ssp.py --workdir=/mnt/runs/1 "
        ">> ~/sspjax.log 2>&1 < /dev/null & }'\n"
    )
    assert printed("tpu_vm.sh", "--dry-run", "logs", *pod) == (
        "gcloud compute tpus tpu-vm ssh pod --zone=us-central1-a --worker=0 "
        "'--command=tail -n 100 -F ~/sspjax.log'\n"
    )
    assert printed("tpu_vm.sh", "--dry-run", "delete", *pod) == (
        "gcloud compute tpus tpu-vm delete pod --zone=us-central1-a --quiet\n"
    )


def test_arguments_reach_the_hosts_as_they_were_given(tmp_path):
    """The printed command is run with a `gcloud` that runs what it is told to."""
    (tmp_path / "sspjax").mkdir()
    python = tmp_path / "sspjax" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$SSPJAX_DISTRIBUTED" "$@"\n')
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text('#!/bin/bash\nlast="${!#}"\nexec bash -c "${last#--command=}"\n')
    python.chmod(0o755)
    gcloud.chmod(0o755)
    line = printed("tpu_vm.sh", "--dry-run", "run", "p", "z", "--", "--a=x & y", "--b='$HOME'")
    environment = {"HOME": str(tmp_path), "PATH": f"{gcloud.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", line], env=environment, check=True, timeout=20)
    log, expected = tmp_path / "sspjax.log", "auto\n-m\nsspjax.train\n--a=x & y\n--b='$HOME'\n"
    deadline = time.monotonic() + 10
    while not (log.exists() and log.read_text() == expected):
        assert time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("local.sh", ("2",), "ARGUMENTS OF sspjax.train"),
        ("local.sh", ("none", "--", "--x"), "ARGUMENTS OF sspjax.train"),
        ("local.sh", ("--slots", "2", "--", "--x"), "ARGUMENTS OF sspjax.train"),
        ("tpu_vm.sh", ("--dry-run", "create", "p", "z", "v9-8"), "TYPE=v9-8: expected v4-*"),
        ("tpu_vm.sh", ("--dry-run", "pause", "p", "z"), "ARGUMENTS OF sspjax.train"),
        ("tpu_vm.sh", ("--dry-run", "run", "p", "z"), "ARGUMENTS OF sspjax.train"),
    ],
)
def test_wrong_calls_are_told(script, arguments, message):
    result = launch(script, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.fixture
def interpreter(tmp_path):
    """A stand-in for Python that writes its environment and acts as BEHAVIOUR_<process> says."""
    path = tmp_path / "python"
    path.write_text(
        "#!/bin/bash\n"
        "[[ $1 == -c ]] && { echo 4321; exit; }\n"
        'echo "$SSPJAX_PROCESS_ID of $SSPJAX_NUM_PROCESSES at $SSPJAX_COORDINATOR: $*"\n'
        'behaviour="BEHAVIOUR_$SSPJAX_PROCESS_ID"\n'
        'eval "${!behaviour:-true}"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_local_processes_run_to_their_end(interpreter):
    result = launch("local.sh", "2", "--", "--x", environment={"PYTHON": interpreter})
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [
        "[0] 0 of 2 at 127.0.0.1:4321: -m sspjax.train --x",
        "[1] 1 of 2 at 127.0.0.1:4321: -m sspjax.train --x",
    ]


def test_a_failing_local_process_ends_the_others(interpreter, tmp_path):
    pid = pathlib.Path(tmp_path, "pid")
    environment = {
        "PYTHON": interpreter,
        "BEHAVIOUR_0": f"echo $$ > {pid}; exec sleep 60",
        "BEHAVIOUR_1": f"while [[ ! -s {pid} ]]; do sleep 0.01; done; exit 7",
    }
    start = time.monotonic()
    result = launch("local.sh", "2", "--", "--x", environment=environment)
    assert result.returncode == 7
    assert "process 1 failed with exit code 7" in result.stderr
    assert time.monotonic() - start < 15
    assert not pathlib.Path("/proc", pid.read_text().strip()).exists()
