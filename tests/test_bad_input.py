"""What a user gets wrong arrives as one line that says how to mend it, and exit status 2."""

import errno
import gzip
import json
import logging
import subprocess
import sys

import pytest
from miniature import CONFIG, config, flags
from processes import ROOT, python_environment

from retrieval_index.build import build as build_index
from sspjax import train
from sspjax.checkpoint import CheckpointError
from sspjax.command_line import run
from sspjax.config import ConfigError
from sspjax.data.answers import DataError
from sspjax.judges.referee import JudgeError
from sspjax.metrics import MetricsError
from sspjax.processes import ProcessError
from sspjax.retrieval.client import RetrievalError
from sspjax.retrieval.corpus import CorpusError
from sspjax.retrieval.encoder import EncoderError
from sspjax.retrieval.index import IndexFolderError
from sspjax.retrieval.vectors import VectorError
from sspjax.rollout.prompts import PromptTooLong
from sspjax.rollout.tokenizer import TokenizerError
from sspjax.self_play.graph import GraphError


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the train command in this process; gives its error line."""
    monkeypatch.chdir(ROOT)
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    def fails(*arguments):
        with pytest.raises(SystemExit) as ended:
            run(train.main, list(map(str, arguments)))
        assert ended.value.code == 2
        told = capsys.readouterr().err.splitlines()
        assert [line for line in told if line.startswith("error: ")] == told[-1:], told
        return told[-1]

    yield fails
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def start(command, tmp_path):
    """The miniature in an empty workdir, with some settings."""

    def starts(settings, *more):
        return command(
            f"--config={CONFIG}", f"--workdir={tmp_path / 'run'}", *flags(settings), *more
        )

    return starts


# The config ---------------------------------------------------------------------------------------


def test_one_line_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sspjax.train", f"--config={CONFIG}", f"--workdir={tmp_path}"]
        + ["--config.learner.learning_rat=0.1"],
        cwd=ROOT,
        env=python_environment(1),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: config.learner.learning_rat=0.1: unknown key")
    assert "did you mean learning_rate?" in line
    assert "known here: loss, order, old_logprobs" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bacth": 4}, ("config.bacth=4", "did you mean batch?", "known here: seed, steps, batch")),
        ({"batch": "many"}, ("config.batch=many", "expected int")),
        ({"batch": 0}, ("config.batch=0", "at least 1")),
        ({"model.remat": 1}, ("config.model.remat=1", "true or false")),
        ({"learner.order": "both"}, ("'both'", "solver_first, proposer_first, joint")),
        ({"learner": 3}, ("config.learner", "group")),
        ({"seed.path": 3}, ("config.seed.path=3", "seed is a value, not a group")),
        ({"solver.group_size": 1}, ("solver.estimator=group_mean", "group_size=1")),
        ({"learner.row_tokens": 64}, ("learner.row_tokens=64", "128")),
        ({"solver.policy": "other"}, ("order=joint", "proposer.policy=policy", "other")),
        ({"mesh.data": 3}, ("config.mesh", "data=3", "8 devices")),
        ({"rollout.slots": 3}, ("config.rollout", "slots=3", "multiples of 2")),
        ({"model.preset": "tinny"}, ("model.preset=tinny", "known presets: tiny")),
        ({"model.tokenizer": "/none"}, ("/none",)),
        ({"retrieval.encoder": "none"}, ("none", "tfidf")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_run(start, settings, words):
    line = start(settings)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("no such file",)),
        ("def get_config(:\n", ("invalid syntax",)),
        ("x = 1\n", ("get_config",)),
        (
            "from sspjax.config import default\n"
            "def get_config():\n    c = default()\n    c.bacth = 4\n    return c\n",
            ("bacth",),
        ),
        (
            "from sspjax.config import default\n"
            "def get_config():\n    c = default()\n    c.batch = '4'\n    return c\n",
            ("batch", "int"),
        ),
    ],
    ids=["missing", "syntax", "empty", "key", "type"],
)
def test_config_files_that_cannot_be_used(command, tmp_path, text, words):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    line = command(f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert str(file) in line
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


# Data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("no such file",)),
        ("", ("the file is empty",)),
        ('{"answer": "a"}\n{"answer": \n', (":2",)),
        ('{"answer": "a"}\n\n["b"]\n', (":3", "object")),
        ('{"answer": "a"}\n{"answer": "  "}\n', (":2", "blank")),
        ('{"answers": ["a", "\\t"]}\n', (":1", "blank")),
        ('{"question": "a"}\n', (":1", "'answers' or 'answer'", "'question'")),
    ],
    ids=["missing", "empty", "cut", "list", "blank", "blank alias", "field"],
)
def test_answers_that_cannot_be_used(start, tmp_path, text, words):
    file = tmp_path / "answers.jsonl"
    if text is not None:
        file.write_text(text)
    line = start({"seeds.path": file})
    assert str(file) in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("no such file",)),
        ('{"id": "1", "contents": "a"}\n{"id": 2\n', (":2",)),
        ('{"id": "1", "contents": "a"}\n{"id": "1", "contents": "b"}\n', ("1",)),
    ],
    ids=["missing", "cut", "twice"],
)
def test_passages_that_cannot_be_used(start, tmp_path, text, words):
    file = tmp_path / "corpus.jsonl"
    if text is not None:
        file.write_text(text)
    line = start({"retrieval.corpus": file})
    assert str(file) in line
    assert all(word in line for word in words), line


def write_corpus(path, *texts):
    rows = [{"id": str(i), "title": text, "text": f"{text} text"} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def index_of(corpus):
    out = corpus.with_suffix(".index")
    build_index(corpus_path=corpus, encoder_name="tfidf", out=out, queries_path=None)
    return out


def test_an_index_of_another_corpus(start, tmp_path):
    other = write_corpus(tmp_path / "other.jsonl", "one", "two", "three", "four")
    index = index_of(other)
    line = start({"retrieval.index": index})
    assert str(index) in line
    assert "the index of another corpus" in line


def test_an_index_of_another_encoder(start, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", "one", "two", "three", "four")
    index = index_of(corpus)
    line = start({"retrieval.corpus": corpus, "retrieval.index": index, "retrieval.encoder": "e5"})
    assert str(index) in line
    assert "retrieval.encoder=tfidf" in line


def test_a_damaged_index(start, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", "one", "two", "three", "four")
    index = index_of(corpus)
    largest = max(
        (p for p in index.iterdir() if p.suffix != ".json"), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-7])
    line = start({"retrieval.corpus": corpus, "retrieval.index": index})
    assert str(largest) in line


def test_a_prompt_that_does_not_fit(taught, command, tmp_path):
    run = taught.copy(tmp_path / "run")
    line = command(*run.arguments({"steps": 1, "proposer.prompt_tokens": 4}, "--force"))
    assert "4 tokens" in line


# The workdir --------------------------------------------------------------------------------------


def test_the_workdir_of_another_run(taught, command, tmp_path):
    run = taught.copy(tmp_path / "run")
    recorded = (run.workdir / "config.json").read_text()
    line = command(*run.arguments({"batch": 5, "learner.kl": 0.5}))
    assert f"{run.workdir} belongs to another run" in line
    assert "config.batch is 8 there and 5 now; config.learner.kl is 0.0 there and 0.5 now" in line
    assert "--force" in line
    assert (run.workdir / "config.json").read_text() == recorded

    train.build(config(run.settings({"batch": 5})), run.workdir, force=True)
    assert json.loads((run.workdir / "config.json").read_text())["config"]["batch"] == 5


def test_what_may_change_from_start_to_start(taught, tmp_path):
    run = taught.copy(tmp_path / "run")
    free = {"steps": 9, "checkpoint.every": 2, "eval.every": 0, "rollout.slots": 4, "mesh.fsdp": 2}
    train.build(config(run.settings(free)), run.workdir)


def test_the_workdir_of_another_corpus(taught, command, tmp_path):
    run = taught.copy(tmp_path / "run")
    corpus = run.workdir / "world" / "corpus.jsonl.gz"
    first, *rest = gzip.decompress(corpus.read_bytes()).splitlines(keepends=True)
    corpus.write_bytes(gzip.compress(b"".join([first.replace(b" is ", b" was "), *rest])))
    line = command(*run.arguments({}))
    assert "corpus is " in line and "index is " in line


def test_a_workdir_that_is_a_file(command, tmp_path):
    (tmp_path / "run").write_text("")
    line = command(f"--config={CONFIG}", f"--workdir={tmp_path / 'run'}")
    assert str(tmp_path / "run") in line


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_the_step_before(taught, tmp_path):
    """A limit on the size of files makes the checkpoint's writes fail, as a full disk would."""
    run = taught.copy(tmp_path / "run")
    settings = {"steps": 1, "save_trajectories": 0}
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 100; exec "$@"', "limited", sys.executable]
        + ["-m", "sspjax.train", *run.arguments(settings, "--force")],
        cwd=ROOT,
        env=python_environment(1, run.environment()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    # The storage library may still report events of a loop that is gone; they are not ours.
    (line,) = [told for told in done.stderr.splitlines() if told.startswith("error: ")]
    assert "saving step 1 failed" in line
    assert "File too large" in line
    assert "step 0, is untouched" in line
    run.train(settings)
    assert [row["step"] for row in run.rows()] == [0, 1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_what_the_system_says_of_a_disk_is_one_line(capsys, code):
    def main(argv):
        raise OSError(code, "no way", "/data/run/metrics.jsonl")

    with pytest.raises(SystemExit) as ended:
        run(main, [])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/data/run/metrics.jsonl" in line and "no way" in line


def test_what_is_not_the_users_to_mend_keeps_its_traceback():
    def main(argv):
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        run(main, [])


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (ConfigError, ValueError),
        (CheckpointError, RuntimeError),
        (CorpusError, ValueError),
        (DataError, ValueError),
        (EncoderError, ValueError),
        (GraphError, ValueError),
        (IndexFolderError, ValueError),
        (JudgeError, RuntimeError),
        (MetricsError, ValueError),
        (ProcessError, RuntimeError),
        (PromptTooLong, ValueError),
        (RetrievalError, RuntimeError),
        (TokenizerError, ValueError),
        (train.TooManyFailures, RuntimeError),
        (VectorError, ValueError),
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_a_user_can_mend(capsys, kind, built_in):
    def main(argv):
        raise kind("expected this,\n  got that")

    with pytest.raises(SystemExit) as ended:
        run(main, [])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: expected this, got that\n"
    assert issubclass(kind, built_in)
