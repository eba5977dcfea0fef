"""Corpora on disk: the same passages, ids and titles as in memory; folders that are none."""

import json
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, python_environment

from sspjax.retrieval import store
from sspjax.retrieval.corpus import CorpusError, join_contents, read_corpus, split_contents, window
from sspjax.retrieval.store import StoredCorpus, open_corpus, write_store
from sspjax.types import Document


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """750 passages of 150 articles, read and stored."""
    folder = tmp_path_factory.mktemp("both")
    rows = [
        {"id": f"é{i}", "title": f"Łódź {i * 7 % 150}", "text": f"text {i} " * (i % 5)}
        for i in range(750)
    ]
    path = write(folder / "c.jsonl", rows)
    return read_corpus(path), write_store(path, folder / "store")


def test_a_store_holds_what_the_file_holds(both):
    memory, stored = both
    assert len(stored) == 750
    assert list(stored) == list(memory)
    assert stored.content_hash == memory.content_hash
    assert [stored.row(d.id) for d in memory] == list(range(750))
    for title in {d.title for d in memory} | {"nobody", "\udc00"}:
        assert stored.by_title(title) == memory.by_title(title)
    for missing in ("é750", "", "\udc00"):
        with pytest.raises(KeyError):
            stored.row(missing)
    for row in (-1, 750):
        with pytest.raises(IndexError, match="rows 0 to 749"):
            stored.document(row)


def test_hashes_that_collide_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_hashed", lambda key: len(key))
    rows = [{"id": str(i), "title": "ab"[i % 2], "text": f"{i}"} for i in range(10)]
    stored = write_store(write(tmp_path / "c.jsonl", rows), tmp_path / "store")
    assert [stored.row(str(i)) for i in range(10)] == list(range(10))
    assert [d.id for d in stored.by_title("b")] == ["1", "3", "5", "7", "9"]
    assert [d.id for d in stored.by_title("a")] == ["0", "2", "4", "6", "8"]
    assert stored.by_title("c") == ()


def test_windows_of_an_article(both):
    for corpus in both:
        article = corpus.by_title("Łódź 3")
        assert len(article) == 5
        seen = window(corpus, "Łódź 3", start=1, count=2)
        assert (seen.documents, seen.start, seen.total) == (article[1:3], 1, 5)
        assert window(corpus, "Łódź 3", start=4, count=9).documents == article[4:]
        assert window(corpus, "Łódź 3", start=5, count=1).documents == ()
        assert window(corpus, "nobody", count=3).total == 0
        with pytest.raises(ValueError, match="start=-1"):
            window(corpus, "Łódź 3", start=-1, count=1)


def test_a_store_or_a_file_under_one_name(both, tmp_path):
    memory, stored = both
    assert list(open_corpus(stored.folder)) == list(memory)
    path = write(tmp_path / "c.jsonl", [{"id": "a", "contents": "x"}])
    assert list(open_corpus(path)) == [Document(id="a", title="", text="x")]


def test_a_passage_of_two_megabytes(tmp_path):
    long = "wörd " * 400_000
    path = write(tmp_path / "c.jsonl", [{"id": "a", "contents": f'"T"\n{long}'}])
    stored = write_store(path, tmp_path / "store")
    assert stored.document(0) == read_corpus(path).document(0)
    assert len(stored.document(stored.row("a")).text) == 2_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "c.jsonl: 0 passages; expected 1"),
        (
            b'\n{"id": "a", "contents": "x"}\n\n{"id": "a", "contents": "y"}\n',
            "c.jsonl:4: id 'a' is already used on line 2",
        ),
        (b'{"id": "a", "contents": "\xff"}\n', "c.jsonl:1: not UTF-8"),
    ],
)
def test_a_corpus_that_cannot_be_stored_leaves_nothing(tmp_path, content, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        write_store(path, tmp_path / "store")
    assert list(tmp_path.iterdir()) == [path]


def test_folders_that_are_no_store(tmp_path):
    path = write(tmp_path / "c.jsonl", [{"id": "a", "contents": "x"}])
    with pytest.raises(CorpusError, match="expected a folder made by .*retrieval_index.store"):
        open_corpus(tmp_path)
    folder = tmp_path / "store"
    write_store(path, folder)
    with pytest.raises(CorpusError, match="exists already"):
        write_store(path, folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": 2}))
    with pytest.raises(CorpusError, match="expected format 1, found 2"):
        StoredCorpus(folder)
    (folder / "meta.json").write_text("[]")
    with pytest.raises(CorpusError, match="not the meta.json of a store"):
        StoredCorpus(folder)
    (folder / "meta.json").write_text(json.dumps(meta))
    whole = (folder / "ids.npy").read_bytes()
    (folder / "ids.npy").write_bytes(whole[:-1])
    with pytest.raises(CorpusError, match=f"expected {len(whole)} bytes, found {len(whole) - 1}"):
        StoredCorpus(folder)


def test_the_tables_are_half_full_at_most():
    hashes = np.arange(100, dtype=np.uint64) * np.uint64(2**40)
    table = store._table(hashes, np.arange(100))
    assert len(table) == 256
    assert sorted(table[table > 0].tolist()) == list(range(1, 101))


def test_contents_go_there_and_back():
    for document in (
        Document(id="a", title="T", text="one\ntwo"),
        Document(id="a", title="", text=""),
        Document(id="a", title='"q" r', text="x"),
    ):
        assert split_contents(join_contents(document)) == (document.title, document.text)
    assert join_contents(Document(id="a", title="T\nU", text="x")) == '"T U"\nx'


def test_the_command(tmp_path):
    path = write(tmp_path / "c.jsonl", [{"id": "a", "contents": "x"}])
    command = [sys.executable, "-m", "retrieval_index.store", f"--corpus={path}"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'store'}"],
        cwd=ROOT,
        env=python_environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 passages" in done.stderr
    assert len(open_corpus(tmp_path / "store")) == 1
