"""One run: its passages from an index, a server that is killed meanwhile, and a recording."""

import socket
import subprocess
import sys
import threading
import time

import pytest
from miniature import assert_same_run, config
from processes import ROOT, python_environment

from retrieval_index.build import build as build_index
from sspjax.reopen import recorded_config
from sspjax.retrieval.store import write_store
from sspjax.train import own_corpus, retrieve
from sspjax.workdir import Workdir

STEPS = 3


@pytest.fixture(scope="module")
def recorded(taught, tmp_path_factory):
    """The run over an index in its own process, with a recording of its searches."""
    folder = tmp_path_factory.mktemp("recorded")
    run = taught.copy(folder / "run")
    run.train({"steps": STEPS, "retrieval.record": folder / "searches.jsonl"})
    assert (folder / "searches.jsonl").stat().st_size > 1000
    return run


def test_a_recording_is_left_alone_by_those_who_open_the_run(recorded):
    assert recorded_config(recorded.workdir).retrieval.record == ""
    given = recorded_config(recorded.workdir, [("retrieval.record", "FILE")])
    assert given.retrieval.record == "FILE"


def test_passages_and_index_from_a_store(recorded, tmp_path):
    source = recorded.workdir / "world" / "corpus.jsonl.gz"
    write_store(source, tmp_path / "store")
    build_index(
        corpus_path=tmp_path / "store",
        encoder_name="tfidf",
        out=tmp_path / "index",
        queries_path=None,
    )
    own = config({"retrieval.corpus": tmp_path / "store", "retrieval.index": tmp_path / "index"})
    workdir = Workdir(recorded.workdir)
    stored = retrieve(own, own_corpus(own, workdir))
    read = retrieve(config({}), own_corpus(config({}), workdir))
    assert stored.content["corpus"] == read.content["corpus"]
    queries = [d.title for d in own_corpus(own, workdir)][:20]
    assert stored.search(queries, 2) == read.search(queries, 2)


def test_replayed_without_an_index(recorded, taught, tmp_path):
    run = taught.copy(tmp_path / "run")
    settings = {"steps": STEPS, "retrieval.replay": recorded.workdir.with_name("searches.jsonl")}
    run.train(settings)
    assert_same_run(run, recorded, settings)


def test_a_server_killed_and_started_again_in_training(recorded, taught, tmp_path):
    run = taught.copy(tmp_path / "run")
    corpus = run.workdir / "world" / "corpus.jsonl.gz"
    index = tmp_path / "index"
    build_index(corpus_path=corpus, encoder_name="tfidf", out=index, queries_path=None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "sspjax.retrieval.server"]
    program += [f"--index={index}", f"--corpus={corpus}", f"--port={port}"]
    url = f"http://127.0.0.1:{port}"
    settings = {"steps": STEPS, "retrieval.url": url, "retrieval.retries": 40}
    logs = []
    # The index has another name than one made at the start, so the run is told to go on with it.
    learner = threading.Thread(target=lambda: logs.append(run.train(settings, "--force")))

    def served():
        return subprocess.Popen(
            program, cwd=ROOT, env=python_environment(1), stderr=subprocess.DEVNULL
        )

    server = served()
    try:
        learner.start()
        while learner.is_alive() and len(run.rows()) < 2:
            time.sleep(0.01)
        server.kill()
        server.wait()
        time.sleep(0.2)
        server = served()
        learner.join()
    finally:
        server.kill()
        server.wait()
    (log,) = logs
    assert "trying again" in log
    assert "have no result" not in log
    assert_same_run(run, recorded, settings)
