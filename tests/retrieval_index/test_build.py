"""The build command: a folder that the run accepts, and errors on one line."""

import gzip
import json
import logging
import subprocess
import sys

import pytest

from retrieval_index import build
from sspjax.retrieval.client import open_retriever
from sspjax.retrieval.corpus import read_corpus
from sspjax.retrieval.index import Recall

ROWS = [
    {"id": str(i), "contents": f'"Name{i} Place{i % 7}"\nplace{i % 7} lies near word{i % 11} .'}
    for i in range(40)
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return path


def run(*arguments):
    return build.main([str(argument) for argument in arguments])


def test_a_built_index_opens_and_finds(corpus, tmp_path, caplog):
    out = tmp_path / "index"
    with caplog.at_level(logging.INFO):
        assert run(f"--corpus={corpus}", "--encoder=tfidf", f"--out={out}") == 0
    meta = json.loads((out / "meta.json").read_text())
    assert meta["recall"] == {"share": 1.0, "k": 3, "queries": 40}
    assert meta["passages"] == 40
    for said in ("read 40 passages in", "built the exact index in", "recall@3", "MB, hash"):
        assert said in caplog.text
    assert meta["hash"] in caplog.text
    retriever = open_retriever(read_corpus(corpus), out, encoder="tfidf")
    assert retriever.search(["name17 place3"], 1)[0][0].id == "17"
    assert retriever.index.recall == Recall(share=1.0, k=3, queries=40)


def test_the_same_build_has_the_same_hash(corpus, tmp_path):
    for name in ("a", "b"):
        run(f"--corpus={corpus}", "--encoder=tfidf", f"--out={tmp_path / name}")
    first, second = ((tmp_path / name / "meta.json").read_text() for name in ("a", "b"))
    assert first == second


def test_queries_of_every_format(tmp_path):
    plain = tmp_path / "q.txt"
    plain.write_text("one\n\n two words \n", encoding="utf-8")
    assert build.read_queries(plain) == ["one", "two words"]
    rows = tmp_path / "q.jsonl.gz"
    rows.write_bytes(gzip.compress(b'{"question": "one", "answers": []}\n\n{"query": "two"}\n'))
    assert build.read_queries(rows) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.txt", b"\n \n", "no queries"),
        ("q.txt", b"\xff\n", "cannot be read"),
        ("q.jsonl", b'{"text": "x"}\n', ":1: expected an object with a question or a query"),
        ("q.jsonl", b'{"question": 3}\n', ":1: expected an object"),
        ("q.jsonl", b'"x"\n', ":1: expected an object"),
        ("q.jsonl", b"\n{\n", ":2: not JSON"),
        ("q.txt.gz", b"plain", "cannot be read"),
    ],
)
def test_queries_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(build.QueriesError, match=message):
        build.read_queries(tmp_path / name)


def test_recall_is_asked_with_given_queries_and_at_most_a_thousand(corpus, tmp_path):
    queries = tmp_path / "q.txt"
    queries.write_text("".join(f"name{i % 40} word{i}\n" for i in range(1500)), encoding="utf-8")
    out = tmp_path / "index"
    arguments = (f"--corpus={corpus}", "--encoder=tfidf", f"--queries={queries}", f"--out={out}")
    assert run(*arguments) == 0
    assert json.loads((out / "meta.json").read_text())["recall"]["queries"] == 1000


def test_low_recall_warns(corpus, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(build, "measure_recall", lambda *_, k: Recall(share=0.94, k=k, queries=40))
    out = tmp_path / "index"
    with caplog.at_level(logging.WARNING):
        assert run(f"--corpus={corpus}", "--encoder=tfidf", f"--out={out}") == 0
    assert "recall@3 0.9400 is below 0.95" in caplog.text
    assert json.loads((out / "meta.json").read_text())["recall"]["share"] == 0.94


def test_without_titles_the_first_words_are_asked():
    from sspjax.retrieval.corpus import MemoryCorpus
    from sspjax.types import Document

    texts = ["a b c d e f g h i j k l", "z"]
    corpus = MemoryCorpus([Document(id=t[0], title="", text=t) for t in texts])
    assert build.titles(corpus) == ["a b c d e f g h i j", "z"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--corpus": "{tmp}/none.jsonl"}, "no such file"),
        ({"--encoder": "glove"}, "unknown encoder 'glove'; expected one of: tfidf"),
        ({"--out": "{tmp}"}, "exists already"),
        ({"--queries": "{tmp}/none.txt"}, "cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_2(corpus, tmp_path, caplog, change, message):
    arguments = {"--corpus": corpus, "--encoder": "tfidf", "--out": tmp_path / "index"}
    arguments |= {name: value.format(tmp=tmp_path) for name, value in change.items()}
    assert run(*(f"{name}={value}" for name, value in arguments.items())) == 2
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert message in errors[0].getMessage()
    assert "\n" not in errors[0].getMessage()
    assert not (tmp_path / "index").exists()


def test_the_command_itself(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    command = [sys.executable, "-m", "retrieval_index.build", "--encoder=tfidf"]
    done = subprocess.run(
        [*command, f"--corpus={tmp_path / 'bad.jsonl'}", f"--out={tmp_path / 'index'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "bad.jsonl:1: expected id and contents" in done.stderr
