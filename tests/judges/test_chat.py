"""A service that does everything a service should not do."""

import datetime
import itertools
import json
import logging

import pytest
from chat_server import Reply, fair, serving, text

from sspjax.judges.chat import Chat, Lost, chat_request, completion, pause, retry_after, said
from sspjax.types import Message


def ask(content, **settings):
    given = {"model": "m", "temperature": 0.0, "max_tokens": 8, "about": {}, **settings}
    return chat_request([Message(author="user", content=content)], **given)


def chat(service, **settings):
    given = {"tries": 3, "backoff": 0.001, "timeout": 30.0, "concurrency": 4, **settings}
    return Chat(service.url, **given)


def complete(service, count=1, **settings):
    heard = []
    replies = chat(service, **settings).complete(
        [ask(f"question {i}") for i in range(count)], lambda i, reply: heard.append((i, reply))
    )
    assert sorted(heard) == [(i, r) for i, r in enumerate(replies) if not isinstance(r, Lost)]
    return replies


def in_turn(*replies):
    """The replies one after another, the last one for ever."""
    queue = itertools.chain(replies, itertools.repeat(replies[-1]))
    return lambda request: next(queue)


def test_what_is_sent():
    with serving(in_turn(text("yes"))) as service:
        assert complete(service) == ["yes"]
    assert service.paths == ["/v1/chat/completions"]
    assert service.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "question 0"}],
            "temperature": 0.0,
            "max_tokens": 8,
        }
    ]
    assert "Authorization" not in service.headers[0]


def test_replies_are_in_order_and_no_more_than_allowed_are_in_flight():
    with serving(lambda request: text(request["messages"][0]["content"], delay=0.05)) as service:
        assert complete(service, 20) == [f"question {i}" for i in range(20)]
    assert 1 < service.most_in_flight <= 4


def test_nothing_asked_is_nothing_sent():
    assert Chat("http://127.0.0.1:9/v1").complete([], lambda *_: None) == []


PASSING = {
    "429": Reply(status=429, body=b"slow down"),
    "500": Reply(status=500, body=b"<html>oops</html>"),
    "503": Reply(status=503),
    "hang-up": Reply(hang_up=True),
    "slow": text("late", delay=10.0),
    "no JSON": Reply(body=b"<html>welcome</html>"),
    "another JSON": Reply(body=b'{"choices": []}'),
    "nested": Reply(body=b"[" * 100_000),
    "no text": text(None),
    "not UTF-8": Reply(body=b'\xff\xfe{"choices"'),
    "compressed": Reply(body=b"no gzip", headers={"Content-Encoding": "gzip"}),
}


def patience(trouble):
    """Short only where it is waited for: this machine may be busy."""
    return 1.0 if trouble == "slow" else 30.0


@pytest.mark.parametrize("trouble", PASSING)
def test_trouble_that_passes_is_tried_again(trouble):
    with serving(in_turn(PASSING[trouble], text("yes"))) as service:
        assert complete(service, timeout=patience(trouble)) == ["yes"]
    assert len(service.requests) == 2


@pytest.mark.parametrize("trouble", PASSING)
def test_trouble_that_stays_is_a_lost_request(trouble, caplog):
    words = {
        "429": "HTTP 429: slow down",
        "500": "HTTP 500: <html>oops</html>",
        "503": "HTTP 503",
        "hang-up": "RemoteProtocolError: Server disconnected without sending a response.",
        "slow": "no reply within 1 s",
        "compressed": "DecodingError",
    }
    with serving(in_turn(PASSING[trouble])) as service:
        (lost,) = complete(service, timeout=patience(trouble))
    assert isinstance(lost, Lost)
    assert words.get(trouble, "a body that is no chat completion") in lost.reason
    assert len(service.requests) == 3
    # Said once, not for every try.
    assert caplog.text.count("trying again") == 1


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_what_will_not_pass_is_not_tried_again(status):
    with serving(in_turn(Reply(status=status, body=b"no   such\nmodel"))) as service:
        assert complete(service) == [Lost(reason=f"HTTP {status}: no such model")]
    assert len(service.requests) == 1


def test_bytes_that_trickle_in_do_not_buy_time():
    """A client's own timeout starts again with each byte; this one is for the whole try."""
    with serving(in_turn(Reply(body=b"x" * 100, trickle=0.1))) as service:
        assert complete(service, tries=1, timeout=1.0) == [Lost(reason="no reply within 1 s")]


def test_nobody_listens():
    with serving(fair) as service:
        pass
    (lost,) = complete(service)
    assert "ConnectError" in lost.reason


def test_a_service_that_is_down_is_not_waited_for_by_every_request():
    with serving(in_turn(Reply(status=500))) as service:
        replies = complete(service, 30, tries=2)
    assert all(isinstance(r, Lost) for r in replies)
    # Eight in a row, and the three that were in flight with the last of them, twice each.
    assert 16 <= len(service.requests) <= 22
    assert replies[-1].reason == "not sent, the service seems to be down"


def test_single_failures_are_no_outage():
    with serving(
        lambda r: Reply(status=400) if r["messages"][0]["content"][-1] in "12345" else text("yes")
    ) as service:
        replies = complete(service, 60, concurrency=1)
    assert sum(isinstance(r, Lost) for r in replies) == 30
    assert len(service.requests) == 60


# Waiting ------------------------------------------------------------------------------------------


def test_retry_after_is_obeyed():
    with serving(in_turn(Reply(status=429, headers={"Retry-After": "1"}), text("yes"))) as service:
        assert complete(service) == ["yes"]
    assert service.times[1] - service.times[0] >= 1.0


def test_who_asks_to_wait_too_long_is_not_waited_for():
    busy = Reply(status=503, headers={"Retry-After": "3600"})
    with serving(in_turn(busy)) as service:
        (lost,) = complete(service)
    assert lost.reason == "HTTP 503, and to be asked again in 3600 s only"
    assert len(service.requests) == 1


def test_retry_after_as_number_and_date():
    today = datetime.datetime(2026, 3, 1, 12, 0, 0, tzinfo=datetime.UTC)
    assert retry_after("7", today) == 7.0
    assert retry_after("Sun, 01 Mar 2026 12:01:30 GMT", today) == 90.0
    assert retry_after("Sun, 01 Mar 2026 11:00:00 GMT", today) == 0.0
    for garbage in ("", "soon", "-3", "²", "1e3", "nan"):
        assert retry_after(garbage, today) == 0.0


def test_pauses_double_and_are_spread():
    assert [pause(i, 1.0, 0.0) for i in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert [pause(i, 1.0, 1.0) for i in range(3)] == [0.5, 1, 2]


# The key ------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_told(caplog):
    caplog.set_level(logging.DEBUG)
    key = "sk-test-0123456789"
    refusal = Reply(status=401, body=f"Incorrect API key provided: {key}.".encode())
    with serving(in_turn(Reply(status=500, body=key.encode()), refusal)) as service:
        (lost,) = complete(service, key=key)
    assert service.headers[0]["Authorization"] == f"Bearer {key}"
    assert lost.reason == "HTTP 401: Incorrect API key provided: ***."
    assert "trying again" in caplog.text
    assert key not in caplog.text


# Texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["שלום עולם", "🙂🙃", "a\u0000b\u202e", "x" * 10_000, 'say "yes"\n', "\\u0041"]
)
def test_any_text_arrives(content):
    with serving(lambda request: text(request["messages"][0]["content"])) as service:
        assert chat(service).complete([ask(content)], lambda *_: None) == [content]


def test_half_a_character_arrives_as_a_question_mark():
    assert json.loads(ask("a\ud800b").body)["messages"][0]["content"] == "a?b"


def test_a_key_is_that_of_the_whole_request():
    assert ask("a").key == ask("a", about={"x": 1}).key
    others = [ask("b"), ask("a", model="n"), ask("a", temperature=0.1), ask("a", max_tokens=9)]
    assert len({r.key for r in (ask("a"), ask("a", seed=1), *others)}) == 6


def test_completion():
    assert completion(text("a").body) == "a"
    assert completion(b'{"choices": [{"message": {"content": 3}}]}') is None
    assert completion(b'{"error": {"message": "no"}}') is None
    assert completion(b"null") is None


def test_thoughts_are_no_reply():
    assert said("<think>Correct?</think>\n Incorrect ") == "Incorrect"
    assert said(" yes ") == "yes"
