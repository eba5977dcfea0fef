"""Recordings: what is written, and a run's searches repeated from it."""

import json

import pytest
from serving import CORPUS, retriever_of

from sspjax.config import RetrievalConfig
from sspjax.retrieval.client import RetrievalError
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.recording import (
    RecordingError,
    RecordingRetriever,
    ReplayRetriever,
    of_process,
)
from sspjax.retrieval.source import open_source
from sspjax.types import Document

ADA = Document(id="ada", title="Ada", text="Wrote a program.")
CONTENT = {"corpus": "c", "index": "i"}


class Scripted:
    """A retriever with known answers, one after another; an error is raised."""

    content = CONTENT

    def __init__(self, *answers):
        self.answers = list(answers)

    def search(self, queries, topk):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_searched_is_replayed(tmp_path):
    path = tmp_path / "new" / "searches.jsonl"
    local = retriever_of()
    recorder = RecordingRetriever(local, path)
    asked = [(["ada  program", "zebra", ""], 3), (["machine", "ada program"], 3), (["machine"], 1)]
    results = [recorder.search(*one) for one in asked]
    replay = ReplayRetriever(path)
    assert [replay.search(*one) for one in asked] == results
    assert results[0][1:] == [(), ()]
    assert replay.content == local.content == recorder.content
    with pytest.raises(RecordingError, match="'machine' for 2 passages was not recorded"):
        replay.search(["machine"], 2)
    told = lines(path)
    ids = [line["id"] for line in told if "id" in line]
    assert len(ids) == len(set(ids))
    queries = [(line["query"], line["topk"]) for line in told if "query" in line]
    assert queries == [
        ("ada program", 3),
        ("zebra", 3),
        ("", 3),
        ("machine", 3),
        ("machine", 1),
    ]


def test_failures_are_recorded_until_a_search_succeeds(tmp_path):
    path = tmp_path / "r.jsonl"
    down = RetrievalError("down")
    recorder = RecordingRetriever(Scripted([None, (ADA,)], down, [(ADA,), None]), path)
    recorder.search(["a", "b"], 3)
    with pytest.raises(RetrievalError):
        recorder.search(["c"], 3)
    assert ReplayRetriever(path).search(["a", "b", "c"], 3) == [None, (ADA,), None]
    recorder.search(["a", "b"], 3)
    assert ReplayRetriever(path).search(["a", "b", "c"], 3) == [(ADA,), (ADA,), None]


def test_a_recording_is_continued_after_a_kill(tmp_path):
    path = tmp_path / "r.jsonl"
    RecordingRetriever(Scripted([(ADA,)]), path).search(["a"], 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"query": "half a li')
    assert ReplayRetriever(path).search(["a"], 3) == [(ADA,)]
    recorder = RecordingRetriever(Scripted([(ADA,), ()]), path)
    assert path.read_bytes() == whole
    recorder.search(["a", "b"], 3)
    assert lines(path)[3:] == [{"query": "b", "topk": 3, "ids": []}]
    path.write_bytes(b'{"format"')
    RecordingRetriever(Scripted([()]), path).search(["a"], 3)
    assert ReplayRetriever(path).search(["a"], 3) == [()]


def test_every_process_has_its_own_and_all_are_replayed(tmp_path):
    path = tmp_path / "r.jsonl"
    for process, query in enumerate(("a", "b", "c")):
        own = of_process(path, process)
        RecordingRetriever(Scripted([(ADA,)]), own).search([query], 3)
    (tmp_path / "r.jsonl.bak").write_text("something else")
    assert sorted(p.name for p in tmp_path.iterdir())[:3] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert ReplayRetriever(path).search(["a", "b", "c"], 3) == [(ADA,)] * 3
    first = json.dumps({"format": 1, "content": {"corpus": "other", "index": "i"}})
    of_process(path, 3).write_text(first + "\n")
    with pytest.raises(RecordingError, match="several indices"):
        ReplayRetriever(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: expected a line"),
        ("[]\n", ":1: expected a line"),
        ('{"format": 2, "content": {}}\n', "expected format 1, found 2"),
        ('{"format": 1, "content": {}}\n{"query": "a", "topk": 3}\n', ":2: expected a line"),
        ('{"format": 1, "content": {}}\n\n', ":2: expected a line"),
        (
            '{"format": 1, "content": {}}\n{"query": "a", "topk": 3, "ids": ["x"]}\n',
            ":2: expected a line",
        ),
    ],
)
def test_what_is_no_recording(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message) as caught:
        ReplayRetriever(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(RecordingError, match="no such file; make it with config.retrieval.record"):
        ReplayRetriever(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b'{"format": "\xff"}\n')
    with pytest.raises(RecordingError, match="cannot be read"):
        ReplayRetriever(tmp_path / "latin")
    with pytest.raises(RecordingError, match="cannot be written"):
        RecordingRetriever(Scripted(), tmp_path)
    path = tmp_path / "r.jsonl"
    RecordingRetriever(retriever_of(), path)
    with pytest.raises(RecordingError, match="a recording of another index: expected .*found"):
        RecordingRetriever(Scripted(), path)


def test_the_config_chooses(tmp_path):
    path = str(tmp_path / "r.jsonl")
    built = open_source(RetrievalConfig(encoder="tfidf"), CORPUS)
    recorded = open_source(RetrievalConfig(encoder="tfidf", record=path), CORPUS)
    assert recorded.search(["ada"], 3) == built.search(["ada"], 3)
    for corpus in (CORPUS, None):
        replayed = open_source(RetrievalConfig(encoder="none", replay=path), corpus)
        assert replayed.search(["ada"], 3) == built.search(["ada"], 3)
        assert replayed.content == built.content
    other = MemoryCorpus(list(CORPUS)[1:])
    with pytest.raises(RetrievalError, match="config.retrieval.replay=.*another corpus"):
        open_source(RetrievalConfig(replay=path), other)
    with pytest.raises(RetrievalError, match="expected passages, or servers"):
        open_source(RetrievalConfig(), None)
    open_source(RetrievalConfig(encoder="tfidf", record=path), CORPUS, process=2)
    assert (tmp_path / "r.jsonl.2").exists()
