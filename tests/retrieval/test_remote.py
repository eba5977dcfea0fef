"""The client of servers: what it asks, what it makes of their answers, and how long it tries."""

import json
import math
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from processes import ROOT, python_environment
from serving import CORPUS, answering, retriever_of, serving

from retrieval_index.build import build as build_index
from sspjax.config import RetrievalConfig
from sspjax.retrieval.client import Hit, RetrievalError
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.remote import (
    Breaker,
    Failure,
    HttpRetriever,
    Patience,
    endpoint,
    merge,
)
from sspjax.retrieval.source import open_source
from sspjax.types import Document

QUICK = Patience(timeout=5, retries=2, deadline=20, first_wait=0.01, longest_wait=0.02, rest=60)


def remote(*urls, patience=QUICK, **options):
    return HttpRetriever(urls, patience=patience, seed=0, **options)


def passages(*ids, **more):
    return [
        {"document": {"id": id, "contents": f'"T"\n{id}'}, "score": 1 - i / 8, **more}
        for i, id in enumerate(ids)
    ]


def for_each(request, entries):
    return 200, {"result": [entries for _ in request["queries"]]}


def ids(results):
    return [None if r is None else [d.id for d in r] for r in results]


def test_the_same_passages_as_in_process():
    local = retriever_of()
    queries = ["Ada Lovelace", "machine program", "  loom\n", "zebra", "", "machine", "loom"]
    with serving(local) as url:
        client = remote(url)
        client.connect(3)
        assert client.content == local.content
        for topk in (1, 3, 9):
            assert client.hits(queries, topk) == local.hits(queries, topk)
            assert client.search(queries, topk) == local.search(queries, topk)
        client.close()


def test_what_is_asked():
    with answering(lambda request: for_each(request, passages("a"))) as (url, asked):
        client = remote(url, batch=2, remember=3)
        client.search(["a", " a ", "b", "", "c", "b"], 3)
        assert sorted((r["queries"] for r in asked), key=len, reverse=True) == [["a", "b"], ["c"]]
        assert all(r["topk"] == 3 and r["return_scores"] is True for r in asked)
        client.search(["c", "b"], 3)
        assert len(asked) == 2
        client.search(["c"], 2)
        assert asked[2:] == [{"queries": ["c"], "topk": 2, "return_scores": True}]
        assert client.search(["", "  "], 3) == [(), ()]
        assert client.search([], 3) == []
        assert len(asked) == 3
        with pytest.raises(ValueError, match="topk=0"):
            client.search(["a"], 0)
        client.close()


def test_urls_with_and_without_a_path():
    assert endpoint("http://host:8000") == "http://host:8000/retrieve"
    assert endpoint("http://host/") == "http://host/retrieve"
    assert endpoint("http://host:1/a/retrieve") == "http://host:1/a/retrieve"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{"id": "a", "contents": '"T"\nx'}], Document(id="a", title="T", text="x")),
        ([{"document": {"id": 7, "contents": "T\nx"}}], Document(id="7", title="T", text="x")),
        (
            [{"document": {"id": "a", "title": "T", "text": "x"}, "score": 2}],
            Document(id="a", title="T", text="x"),
        ),
    ],
    ids=["no scores", "number", "title and text"],
)
def test_layouts_of_other_servers(entries, expected):
    with answering(lambda request: for_each(request, entries)) as (url, _):
        client = remote(url)
        client.connect(3)
        assert client.content == {"corpus": "unknown", "index": "unknown"}
        assert client.search(["q"], 3) == [(expected,)]
        client.close()


def test_passages_without_ids_are_named_by_what_they_say():
    texts = ['"T"\none', '"T"\ntwo']
    entries = [{"document": text, "score": 0.5} for text in texts]
    with answering(lambda request: for_each(request, entries)) as (url, _):
        client = remote(url)
        (found,) = client.search(["q"], 3)
        assert [d.text for d in found] == ["one", "two"]
        assert len({d.id for d in found}) == 2
        (again,) = client.search(["r"], 3)
        assert again == found
        client.close()


def test_more_passages_than_asked_for_are_cut():
    with answering(lambda request: for_each(request, passages("a", "b", "c"))) as (url, _):
        client = remote(url)
        assert ids(client.search(["q"], 2)) == [["a", "b"]]
        client.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>Welcome</html>", r"expected JSON, got status 200 .*<html>Welcome.*3 tries"),
        (b"[" * 100_000, r"expected JSON"),
        ([], r'expected {"result": \[...\]}, got \[\]'),
        ({"results": []}, "expected .*result.*, got"),
        ({"result": [[], []]}, "for each of 3 queries, got 2"),
        ({"result": passages("a", "b", "c")}, "expected a list of passages for query 0, got"),
        ({"result": [[], [], [None]]}, "query 'c': expected a passage and its score, got None"),
        ({"result": [[], [], [{"document": {"id": "a"}}]]}, "expected a passage"),
        ({"result": [[], [], [{"id": "a", "contents": 1}]]}, "expected a passage"),
        ({"result": [[], [], [{"id": "a", "contents": "\ud800"}]]}, "expected a passage"),
        ({"result": [[], [], passages("a", score="1")]}, "expected a passage and its score"),
    ],
)
def test_answers_of_another_shape(answer, message):
    with answering(lambda _: (200, answer)) as (url, asked):
        client = remote(url)
        with pytest.raises(RetrievalError, match=message) as caught:
            client.search(["a", "b", "c"], 3)
        assert url in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(asked) == (3 if isinstance(answer, bytes) else 1)
        client.close()


@pytest.mark.parametrize(
    "padding",
    [
        [*passages("a"), {"document": {"id": "z", "contents": "T\nlast"}, "score": -3.4e38}],
        [*passages("a"), {"document": {"id": "z", "contents": "T\nfirst"}, "score": math.nan}],
        passages("a", "b", "a"),
    ],
    ids=["lowest", "nan", "repeated"],
)
def test_padded_results_fail_their_query_alone(padding, caplog):
    def answer(request):
        return 200, {
            "result": [padding if q == "rare" else passages("a") for q in request["queries"]]
        }

    with answering(answer) as (url, _):
        client = remote(url)
        assert ids(client.search(["q", "rare", "r"], 3)) == [["a"], None, ["a"]]
        assert "1 of 3 queries have no result" in caplog.text
        assert "fills the place of a missing one; ask for fewer" in caplog.text
        client.close()


def test_padding_is_found_at_the_start():
    with answering(lambda request: for_each(request, passages("a", "a"))) as (url, _):
        client = remote(url)
        with pytest.raises(RetrievalError, match="fills the place of a missing one"):
            client.connect(3)
        client.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_passing_trouble_is_tried_again(status):
    troubles = [(status, {"detail": "busy"})] * 2

    def answer(request):
        return troubles.pop() if troubles else for_each(request, passages("a"))

    with answering(answer) as (url, asked):
        client = remote(url)
        assert ids(client.search(["q"], 3)) == [["a"]]
        assert len(asked) == 3
        client.close()


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "SSPJAX_RETRIEVAL_KEY"), (404, "config.retrieval.url"), (302, "config.retrieval.url")],
)
def test_lasting_trouble_is_not(status, message):
    with answering(lambda _: (status, {"detail": "no"})) as (url, asked):
        client = remote(url)
        with pytest.raises(RetrievalError, match=f"status {status}: no; .*{message}"):
            client.search(["q", "r"], 3)
        assert len(asked) == 1
        client.close()


@pytest.mark.parametrize("status", [413, 422, 500])
def test_a_query_that_a_server_cannot_take_fails_alone(status, caplog):
    def answer(request):
        if "poison" in request["queries"]:
            return status, {"detail": "too long"}
        return for_each(request, passages("a"))

    queries = [f"q{i}" for i in range(15)]
    queries.insert(6, "poison")
    with answering(answer) as (url, _):
        client = remote(url)
        found = client.search(queries, 3)
        assert [q for q, f in zip(queries, found, strict=True) if f is None] == ["poison"]
        assert "too long" in caplog.text
        client.close()


def test_waits_grow_with_jitter_and_end_at_the_deadline():
    waits, now = [], [0.0]

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    patience = Patience(retries=9, deadline=20, first_wait=1, longest_wait=6)
    with answering(lambda _: (503, {"detail": "busy"})) as (url, asked):
        client = HttpRetriever([url], patience=patience, seed=3, sleep=sleep, clock=lambda: now[0])
        with pytest.raises(RetrievalError, match="status 503: busy"):
            client.search(["q"], 3)
        client.close()
    rng = random.Random(3)
    whole = [1, 2, 4, 6, 6, 6][: len(waits)]
    assert waits == [w * (0.5 + 0.5 * rng.random()) for w in whole]
    assert len(asked) == len(waits) + 1
    assert sum(waits) < 20 <= sum(waits) + 6


def test_a_server_that_says_when_is_asked_then():
    waits = []
    troubles = [
        (503, {"detail": "busy"}, [("Retry-After", value)]) for value in ("soon", "99", "-1", "2")
    ]

    def answer(request):
        return troubles.pop() if troubles else for_each(request, passages("a"))

    patience = Patience(retries=4, first_wait=0.01, longest_wait=7)
    with answering(answer) as (url, _):
        client = HttpRetriever([url], patience=patience, seed=0, sleep=waits.append)
        client.search(["q"], 3)
        client.close()
    two, negative, long, word = waits
    assert (two, long) == (2, 7)
    assert 0.01 <= negative <= 0.02
    assert 0.04 <= word <= 0.08


def test_a_server_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = remote(url, patience=Patience(timeout=0.05, retries=1, first_wait=0.01))
        with pytest.raises(RetrievalError, match=r"ReadTimeout.*\(2 tries\)"):
            client.search(["q"], 3)
        client.close()


def test_a_breaker_lets_a_server_rest_and_then_tries_once():
    now = [0.0]
    breaker = Breaker(2, 10.0, lambda: now[0])
    breaker.failed("one")
    assert breaker.tries(5) == 5
    breaker.failed("two")
    assert (breaker.tries(5), breaker.reason) == (0, "two")
    now[0] = 10.0
    assert breaker.tries(5) == 1
    breaker.failed("three")
    assert breaker.tries(5) == 0
    now[0] = 20.0
    breaker.answered()
    assert breaker.tries(5) == 5


def test_a_server_that_is_down_is_not_asked_for_every_query():
    with answering(lambda _: (503, {"detail": "down"})) as (url, asked):
        client = remote(url, patience=Patience(retries=0, failures=2, rest=60))
        for query in ("a", "b"):
            with pytest.raises(RetrievalError, match="down"):
                client.search([query], 3)
        with pytest.raises(RetrievalError, match="left alone after failures, the last: .*down"):
            client.search(["c"], 3)
        assert len(asked) == 2
        client.close()


def test_long_passages_and_long_queries():
    """A passage of 2 MB arrives whole; a query of 100,000 characters fails alone, with a reason."""
    long = Document(id="long", title="Long", text="weaving " * 250_000)
    local = retriever_of(MemoryCorpus([*CORPUS, long]))
    query = "weaving " * 12_500
    assert local.search(["weaving"], 1) == local.search([query], 1) == [(long,)]
    with serving(local) as url:
        client = remote(url)
        assert client.search(["weaving", query, "loom"], 1) == [
            (long,),
            None,
            (CORPUS.document(3),),
        ]
        with pytest.raises(RetrievalError, match="characters of a query: expected 0 to 20000, got"):
            client.search([query], 1)
        client.close()


def hit(id, score):
    return Hit(document=Document(id=id, title="", text=""), score=score)


def test_merged_by_score_and_row():
    one = (hit("a", 0.9), hit("b", 0.5), hit("c", 0.5))
    two = (hit("d", 0.95), hit("e", 0.5), hit("a", 0.4))
    found = merge([one, two], 5)
    assert [h.document.id for h in found] == ["d", "a", "b", "c", "e"]
    assert merge([one], 3) is one
    failure = Failure(reason="down")
    assert merge([one, failure], 3) is failure
    assert "sends no scores" in merge([one, (hit("x", math.nan),)], 3).reason


def test_shards_answer_as_one_index():
    shards = [MemoryCorpus(list(CORPUS)[:2]), MemoryCorpus(list(CORPUS)[2:])]
    parts = [retriever_of(shard) for shard in shards]
    with serving(parts[0]) as first, serving(parts[1]) as second:
        client = remote(first, second)
        client.connect(3)
        hashes = ",".join(shard.content_hash for shard in shards)
        assert client.content["corpus"] == hashes
        queries = ["ada program", "machine", "zebra"]
        found = client.hits(queries, 3)
        for query, hits in zip(queries, found, strict=True):
            both = [h for part in parts for h in part.hits([query], 3)[0]]
            assert list(hits) == sorted(both, key=lambda h: -h.score)[:3]
        assert len({h.document.id[:1] for h in found[0]}) > 1
        client.close()


def test_a_shard_that_is_down_leaves_no_half_results():
    def down(_):
        return 503, {"detail": "down"}

    with answering(lambda r: for_each(r, passages("a"))) as (up, _), answering(down) as (off, _):
        client = remote(up, off)
        with pytest.raises(RetrievalError, match="down"):
            client.search(["q"], 3)
        client.close()


def test_another_index_behind_the_same_url_is_noticed():
    served = retriever_of()

    class Changing:
        index, encoder, content = served.index, served.encoder, served.content
        hits = staticmethod(served.hits)

    with serving(Changing()) as url:
        client = remote(url)
        client.connect(3)
        client._servers[0]._index = "0" * 64
        with pytest.raises(RetrievalError, match="searches index .* now, expected 000000000000"):
            client.search(["ada"], 3)
        client.close()


def test_a_corpus_of_another_service_is_refused():
    other = MemoryCorpus([Document(id="x", title="Ada", text="Someone else .")])
    with serving(retriever_of()) as url:
        own = RetrievalConfig(url=url)
        assert open_source(own, CORPUS).content == retriever_of().content
        with pytest.raises(RetrievalError, match="config.retrieval.url=.*another corpus: expected"):
            open_source(own, other)


def test_the_key_comes_from_the_environment():
    with serving(retriever_of(), key="sésame") as url:
        own = RetrievalConfig(url=url, retries=0)
        with pytest.raises(RetrievalError, match="401.*SSPJAX_RETRIEVAL_KEY"):
            open_source(own, None, environ={})
        found = open_source(own, None, environ={"SSPJAX_RETRIEVAL_KEY": "sésame"})
        assert ids(found.search(["loom"], 1)) == [["loom"]]


# The command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus file and its index."""
    folder = tmp_path_factory.mktemp("served")
    rows = [{"id": d.id, "title": d.title, "text": d.text} for d in CORPUS]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(
        corpus_path=folder / "corpus.jsonl",
        encoder_name="tfidf",
        out=folder / "index",
        queries_path=None,
    )
    return folder


def command(folder, *more):
    program = [sys.executable, "-m", "sspjax.retrieval.server", f"--index={folder / 'index'}"]
    return [*program, f"--corpus={folder / 'corpus.jsonl'}", *more]


def started(folder, port):
    return subprocess.Popen(
        command(folder, f"--port={port}"),
        cwd=ROOT,
        env=python_environment(1),
        stderr=subprocess.DEVNULL,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_server_killed_and_started_again_loses_nothing(folder):
    port = free_port()
    local = retriever_of()
    words = [w for d in CORPUS for w in f"{d.title} {d.text}".split()]
    patience = Patience(timeout=5, retries=40, deadline=60, longest_wait=0.5)
    client = remote(f"http://127.0.0.1:{port}", patience=patience)
    rounds, wrong, done = [], [], threading.Event()

    def play():
        while not done.is_set():
            queries = [f"{words[(len(rounds) + i) % len(words)]} {len(rounds)}" for i in range(4)]
            found = client.search(queries, 3)
            wrong.extend(q for q, f in zip(queries, found, strict=True) if f is None)
            wrong.extend(
                q for q, f in zip(queries, local.search(queries, 3), strict=True) if f not in found
            )
            rounds.append(queries)

    def wait_for(count):
        until = time.monotonic() + 50
        while len(rounds) < count and time.monotonic() < until:
            time.sleep(0.01)
        assert len(rounds) >= count

    server = started(folder, port)
    player = threading.Thread(target=play)
    try:
        client.connect(3)  # While it starts.
        player.start()
        wait_for(20)
        server.kill()
        server.wait()
        before = len(rounds)
        time.sleep(0.1)
        server = started(folder, port)
        wait_for(before + 20)
    finally:
        done.set()
        player.join()
        server.kill()
        server.wait()
        client.close()
    assert wrong == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--port=70000"], "--port=70000: expected 0 to 65535"),
        (["--port=0", "--host=192.0.2.1"], "--host=192.0.2.1 --port=0: cannot listen there"),
        (["--index=nowhere"], "nowhere"),
        (["--corpus=nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_a_server_that_cannot_start_says_why(folder, more, message, capsys):
    from sspjax.command_line import run
    from sspjax.retrieval.server import main

    with pytest.raises(SystemExit) as ended:
        run(main, [*command(folder)[3:], *more])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_many_clients_at_once():
    """32 clients of 4 queries each: no error, and the answers of one index."""
    local = retriever_of()
    queries = ["ada", "loom", "machine program", "engines"]
    expected = local.search(queries, 3)
    rounds, wrong = [0] * 32, []
    until = time.monotonic() + 1.5
    with serving(retriever_of()) as url:

        def play(number):
            client = remote(url, remember=0)
            while time.monotonic() < until:
                if client.search(queries, 3) != expected:
                    wrong.append(number)
                rounds[number] += 1
            client.close()

        players = [threading.Thread(target=play, args=(number,)) for number in range(32)]
        for player in players:
            player.start()
        for player in players:
            player.join()
    assert wrong == []
    assert min(rounds) >= 1
