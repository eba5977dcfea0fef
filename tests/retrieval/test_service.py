"""The service: what it answers, what it refuses, how requests share searches."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import CORPUS, retriever_of, serving

from sspjax.retrieval.service import Batcher, Overloaded


@pytest.fixture(scope="module")
def retriever():
    return retriever_of()


@pytest.fixture(scope="module")
def url(retriever):
    limits = {"max_queries": 8, "max_topk": 10, "max_query_chars": 1000, "max_body_bytes": 20_000}
    with serving(retriever, **limits) as url:
        yield url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def ask(http, **body):
    return http.post("/retrieve", json=body)


def test_passages_with_scores(http, retriever):
    answer = ask(http, queries=["Ada Lovelace", "machine", ""], topk=2, return_scores=True)
    assert answer.status_code == 200
    expected = retriever.hits(["Ada Lovelace", "machine", ""], 2)
    assert answer.json() == {
        "result": [
            [
                {
                    "document": {
                        "id": hit.document.id,
                        "contents": f'"{hit.document.title}"\n{hit.document.text}',
                    },
                    "score": hit.score,
                }
                for hit in hits
            ]
            for hits in expected
        ]
    }
    assert [len(hits) for hits in expected] == [2, 2, 0]
    assert answer.headers["X-Index"] == retriever.index.hash


@pytest.mark.parametrize("queries", [[], ["ada"], ["ada", "loom"], ["ada", "loom", "machine"]])
@pytest.mark.parametrize("asking", [{}, {"return_scores": False}, {"topk": None}, {"topk": 0}])
def test_documents_alone_for_any_number_of_queries(http, retriever, queries, asking):
    found = ask(http, queries=queries, **asking).json()["result"]
    expected = retriever.search(queries, 3)
    assert [[d["id"] for d in one] for one in found] == [[d.id for d in one] for one in expected]
    assert all(d.keys() == {"id", "contents"} for one in found for d in one)


def test_more_passages_than_there_are(http):
    (found,) = ask(http, queries=["ada program machine"], topk=10).json()["result"]
    assert {d["id"] for d in found} == {d.id for d in CORPUS}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 422, "body: Field required"),
        (b"{", 422, "body"),
        (b"\xff\xfe", 422, "body.0: JSON decode error"),
        (b'{"queries": ["\xff"]}', 400, "parsing the body"),
        (b"[]", 422, "body"),
        (b"{}", 422, "body.queries: Field required"),
        (b'{"queries": "ada"}', 422, "body.queries: Input should be a valid list"),
        (b'{"queries": ["ada", null]}', 422, "body.queries.1: Input should be a valid string"),
        (b'{"queries": ["\\ud800"]}', 422, "query 0 holds half a surrogate pair"),
        (b'{"queries": [NaN]}', 422, "body.queries.0"),
        (b'{"queries": ["a"], "topk": "3"}', 422, "body.topk: Input should be a valid integer"),
        (b'{"queries": ["a"], "topk": -1}', 422, "topk: expected 0 to 10, got -1"),
        (b'{"queries": ["a"], "topk": 11}', 422, "topk: expected 0 to 10, got 11"),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", 400, "parsing the body"),
        (b'{"queries": ["a"], "return_scores": 1}', 422, "body.return_scores"),
        (json.dumps({"queries": ["a"] * 9}).encode(), 422, "queries: expected 0 to 8, got 9"),
        (
            json.dumps({"queries": ["a" * 1001]}).encode(),
            422,
            "characters of a query: expected 0 to 1000, got 1001",
        ),
        (b"[" * 10_000, 400, "parsing the body"),
        (b'{"queries": ["' + b"a" * 100_000 + b'"]}', 413, "expected at most 20000 bytes"),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(http, body, status, reason):
    answer = http.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["detail"]
    assert ask(http, queries=["ada"]).status_code == 200


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(("queries", "topk", "return_scores", "more")),
        ANYTHING | st.lists(st.text(), max_size=9) | st.integers(-2, 12),
    )
    | ANYTHING,
    st.sampled_from(("application/json", "text/plain", "application/json; charset=latin-1", "/")),
)
def test_any_json_is_answered_or_refused(http, body, kind):
    sent = json.dumps(body).encode()
    answer = http.post("/retrieve", content=sent, headers={"Content-Type": kind})
    if answer.status_code == 200:
        assert len(answer.json()["result"]) == len(body["queries"])
    else:
        assert answer.status_code in (400, 413, 422)
        assert answer.json()["detail"]


def test_a_large_body_in_chunks_of_unknown_number(http):
    answer = http.post("/retrieve", content=(b"a" * 1000 for _ in range(1000)))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/retrieve", 405), ("POST", "/status", 405), ("GET", "/nothing", 404)],
)
def test_other_paths_and_methods(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
        b"GET /status HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_400_and_harms_nobody(url, http, sent):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert http.get("/status").status_code == 200


def test_a_client_that_leaves_half_way_harms_nobody(url, http):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
    assert ask(http, queries=["ada"]).status_code == 200


def test_status_says_what_is_searched(http, retriever):
    told = http.get("/status").json()
    assert told["status"] == "ok"
    assert told["passages"] == 4
    assert (told["corpus"], told["index"]) == (CORPUS.content_hash, retriever.index.hash)
    assert (told["encoder"], told["kind"]) == ("tfidf", "exact")
    assert told["limits"]["max_queries"] == 8


def test_metrics_count_requests_queries_and_time():
    with serving(retriever_of()) as url, httpx.Client(base_url=url, trust_env=False) as http:
        ask(http, queries=["ada", "loom"])
        ask(http, queries="ada")
        answer = http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        'sspjax_retrieval_requests_total{status="200"} 1',
        'sspjax_retrieval_requests_total{status="422"} 1',
        "sspjax_retrieval_queries_total 2",
        "sspjax_retrieval_searches_total 1",
        "sspjax_retrieval_waiting_queries 0",
        'sspjax_retrieval_request_seconds_bucket{le="+Inf"} 2',
        "sspjax_retrieval_request_seconds_count 2",
    ):
        assert line in lines
    buckets = [int(line.rsplit(" ", 1)[1]) for line in lines if "_bucket{" in line]
    assert buckets == sorted(buckets)
    named = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert all(any(line.startswith(name) for name in named) for line in lines if line[0] != "#")


def test_a_key_is_needed_where_there_is_one():
    with (
        serving(retriever_of(), key="sésame") as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        assert http.get("/status").status_code == 200
        right = {"Authorization": "Bearer sésame".encode()}
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": b"\xff"}):
            answer = http.post("/retrieve", json={"queries": ["ada"]}, headers=headers)
            assert answer.status_code == 401
            assert "Authorization: Bearer" in answer.json()["detail"]
            assert http.get("/metrics", headers=headers).status_code == 401
        asked = http.post("/retrieve", json={"queries": ["ada"]}, headers=right)
        assert asked.status_code == 200
        assert http.get("/metrics", headers=right).status_code == 200


class Slow:
    """A retriever whose searches wait until they are let go."""

    def __init__(self):
        self.inner = retriever_of()
        self.index, self.encoder, self.content = (
            self.inner.index,
            self.inner.encoder,
            self.inner.content,
        )
        self.batches = []
        self.started, self.let_go = threading.Event(), threading.Event()

    def hits(self, queries, topk):
        self.batches.append((list(queries), topk))
        self.started.set()
        assert self.let_go.wait(10)
        return self.inner.hits(queries, topk)


def test_a_full_queue_is_told_and_what_waits_is_answered():
    slow = Slow()
    with (
        serving(slow, max_waiting=4) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
        ThreadPoolExecutor(4) as threads,
    ):
        first = threads.submit(ask, http, queries=["ada"])
        assert slow.started.wait(10)
        second = threads.submit(ask, http, queries=["loom", "machine"])
        while http.get("/status").json()["waiting"] < 2:
            pass
        refused = ask(http, queries=["a", "b", "c"])
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert "2 queries are waiting already, of at most 4" in refused.json()["detail"]
        slow.let_go.set()
        assert [len(f.result().json()["result"]) for f in (first, second)] == [1, 2]


def test_requests_that_wait_are_searched_together_and_each_number_of_passages_apart():
    slow = Slow()
    waiting = [(["loom"], 3), (["machine", "ada"], 3), (["loom"], 1), (["program"], 3)]
    with (
        serving(slow, batch=4) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
        ThreadPoolExecutor(8) as threads,
    ):
        futures = [threads.submit(ask, http, queries=["ada"])]
        assert slow.started.wait(10)
        for number, (queries, topk) in enumerate(waiting):
            futures.append(threads.submit(ask, http, queries=queries, topk=topk))
            count = sum(len(q) for q, _ in waiting[: number + 1])
            while http.get("/status").json()["waiting"] < count:
                pass
        slow.let_go.set()
        found = [f.result().json()["result"] for f in futures[1:]]
    assert slow.batches == [
        (["ada"], 3),
        (["loom", "machine", "ada", "program"], 3),
        (["loom"], 1),
    ]
    for (queries, topk), one in zip(waiting, found, strict=True):
        expected = slow.inner.search(queries, topk)
        assert [[d["id"] for d in f] for f in one] == [[d.id for d in e] for e in expected]


def test_a_search_that_fails_fails_its_requests_only():
    def search(queries, topk):
        if "bad" in queries:
            raise ValueError("broken")
        return [()] * len(queries)

    async def story():
        batcher = Batcher(search, batch=8, max_waiting=3)
        task = asyncio.create_task(batcher.run())
        results = await asyncio.gather(
            *(batcher.ask([query], 1) for query in ("good", "bad", "good")), return_exceptions=True
        )
        with pytest.raises(Overloaded):
            await batcher.ask(["a"] * 4, 1)
        task.cancel()
        return results, batcher

    (one, two, three), batcher = asyncio.run(story())
    assert (one, three) == ([()], [()])
    assert isinstance(two, ValueError)
    assert batcher.waiting == 0
