"""Run by test_kill.py: the train command, ended by SIGKILL in the middle of something.

    train_until_killed.py PART ROWS SKIP MOMENT_FILE TRAIN_ARGUMENTS...

The parts of a run are wrapped from outside, so that a second thread knows which one is running. It
looks every half millisecond; once ROWS rows of metrics are written it lets SKIP looks at PART pass,
notes the moment and kills its own process.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time

from sspjax import train, trainer
from sspjax.players import Players
from sspjax.trainer import Trainer

PARTS = (
    ("warm start", Trainer, "teach"),
    ("evaluation", train, "examine"),
    ("verification", train, "verify"),
    ("rollout", Players, "play"),
    ("update", Trainer, "update"),
    ("pack", trainer, "pack"),
)

part, rows, skip, moment_file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
arguments = sys.argv[5:]
workdir = pathlib.Path(next(a for a in arguments if a.startswith("--workdir=")).split("=")[1])
metrics = workdir / ("warm_start.jsonl" if part == "warm start" else "metrics.jsonl")
inside: list[str] = []


def wrapped(name, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        inside.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            inside.pop()

    return call


def saving() -> bool:
    """Whether a checkpoint of self-play is half-written, by whichever thread."""
    return any((workdir / "checkpoints" / "self_play").glob("*tmp*"))


def written() -> int:
    with contextlib.suppress(FileNotFoundError):
        return metrics.read_bytes().count(b"\n")
    return 0


def watch() -> None:
    left = skip
    while True:
        time.sleep(5e-4)
        now = "/".join(inside)
        if (saving() if part == "save" else now == part) and written() >= rows:
            left -= 1
        if left < 0:
            moment = {"part": now, "saving": saving(), "rows": written()}
            pathlib.Path(moment_file).write_text(json.dumps(moment))
            os.kill(os.getpid(), signal.SIGKILL)


for name, owner, attribute in PARTS:
    setattr(owner, attribute, wrapped(name, vars(owner)[attribute]))
sys.setswitchinterval(1e-4)
threading.Thread(target=watch, daemon=True).start()
train.main(arguments)
