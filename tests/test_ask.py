"""One question to a finished run, as a user sees it: real processes, read line by line."""

import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import ROOT, python_environment

from sspjax import ask
from sspjax.command_line import UserError
from sspjax.config import default
from sspjax.types import Act, Document, Turn


def lines_of(arguments):
    """Every line of a process's output with the time it arrived at, and the time of its end."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=python_environment(devices=1),
    )
    with child:
        arrived = [(line.rstrip("\n"), time.monotonic()) for line in child.stdout]
        errors = child.stderr.read()
    assert child.returncode == 0, errors[-4000:]
    return arrived, errors


@pytest.fixture(scope="module")
def question(finished_demo) -> str:
    world = finished_demo.workdir / "world" / "questions" / "1hop.jsonl"
    return json.loads(world.read_text().splitlines()[0])["question"]


def test_turns_are_printed_as_they_happen(finished_demo, question):
    program = str(ROOT / "tests" / "programs" / "ask_slowly.py")
    arrived, _ = lines_of([program, str(finished_demo.workdir), question])
    kinds = [line.partition(":")[0] for line, _ in arrived]
    assert kinds[:2] == ["search", "found"]
    # The tool takes a second: a search is read before its result is there, not with it.
    waits = [
        later - earlier
        for (line, earlier), (_, later) in itertools.pairwise(arrived)
        if line.startswith("search:") and later > earlier
    ]
    found = kinds.count("found")
    assert sum(wait > 0.8 for wait in waits) == found >= 1

    # The command itself says the same, without the wait.
    plain, errors = lines_of(["-m", "sspjax.ask", f"--workdir={finished_demo.workdir}", question])
    assert [line for line, _ in plain] == [line for line, _ in arrived]
    assert errors == ""


def test_a_question_that_is_none_is_told(finished_demo):
    for flags, message in (
        (["--step=last", " "], "question: expected a text"),
        (["--temperature=-1", "who ?"], "--temperature=-1.0: must be >= 0"),
        (["--step=9", "who ?"], "checkpoint of step 9, kept are: 0, 1, 2"),
    ):
        with pytest.raises(UserError, match=message):
            ask.main([f"--workdir={finished_demo.workdir}", *flags])
    with pytest.raises(UserError, match="is not the workdir of a run"):
        ask.main([f"--workdir={finished_demo.workdir}/nowhere", "who ?"])


def turn(**given):
    ids = np.zeros(0, np.int32)
    return Turn(token_ids=ids, logprobs=np.zeros(0, np.float32), **given)


def test_a_turn_is_one_line():
    first = Document(id="1", title="Ada Lovelace", text="...")
    second = Document(id="2", title="", text="...")
    said = turn(sampled=True, text="<search> Ada </search>", act=Act.SEARCH, argument="Ada")
    assert ask.spoken(said) == "search: Ada"
    assert ask.spoken(turn(sampled=False, text="", documents=(first, second))) == (
        "found: Ada Lovelace; 2"
    )
    assert ask.spoken(turn(sampled=False, text="nothing")) == "found: nothing"
    said = turn(sampled=True, text="", act=Act.ANSWER, argument="1815")
    assert ask.spoken(said) == "answer: 1815"
    assert ask.spoken(turn(sampled=True, text="I do\n not  know")) == "said: I do not know"


def test_alone_it_has_a_slot_for_each_device_and_no_mesh_of_the_run(finished_demo):
    c = ask.recorded_config(finished_demo.workdir, [("mesh.tensor", "64"), ("batch", "2")])
    small = ask.alone(c)
    assert (small.rollout.slots, small.rollout.extend_rows) == (8, 8)
    assert small.mesh.tensor == default().mesh.tensor
    assert small.model == c.model
