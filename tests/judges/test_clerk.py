import json

import pytest

from sspjax import processes
from sspjax.judges import clerk as clerk_module
from sspjax.judges.chat import Lost, chat_request
from sspjax.judges.clerk import Clerk, together
from sspjax.judges.journal import Journal
from sspjax.types import Message


def ask(content):
    messages = [Message(author="user", content=content)]
    return chat_request(
        messages, model="m", temperature=0.0, max_tokens=8, about={"question": content}
    )


class Model:
    """Says what the table says; what is not in it is lost."""

    def __init__(self, **table):
        self.table = table
        self.asked = []

    def __call__(self, requests, heard):
        replies = []
        for place, request in enumerate(requests):
            content = json.loads(request.body)["messages"][0]["content"]
            self.asked.append(content)
            if content in self.table:
                heard(place, self.table[content])
            replies.append(self.table.get(content, Lost(reason="HTTP 500")))
        return replies


@pytest.fixture
def path(tmp_path):
    return tmp_path / "judge.jsonl"


def clerk(model, path):
    return Clerk("judge", model, Journal(path, records=True), lambda reply: reply != "hm")


def test_each_request_is_sent_once_and_remembered(path, caplog):
    model = Model(a="yes", b="no")
    own = clerk(model, path)
    assert own.replies([ask(c) for c in "abab"]) == ["yes", "no", "yes", "no"]
    assert own.replies([ask("b")]) == ["no"]
    assert model.asked == ["a", "b"]
    assert own.take_counts() == {
        "perf/judge_asked": 5.0,
        "perf/judge_remembered": 3.0,
        "perf/judge_lost": 0.0,
        "perf/judge_unreadable": 0.0,
    }
    assert set(own.take_counts().values()) == {0.0}
    # Another run of the same workdir does not pay again.
    silent = Model()
    assert clerk(silent, path).replies([ask("a"), ask("b")]) == ["yes", "no"]
    assert silent.asked == []
    assert json.loads(path.read_text().splitlines()[0])["question"] == "a"
    assert caplog.text == ""


def test_what_says_nothing_is_counted_and_asked_again(path, caplog):
    model = Model(a="hm", b="yes")
    own = clerk(model, path)
    assert own.replies([ask(c) for c in "acbc"]) == ["hm", None, "yes", None]
    assert own.replies([ask(c) for c in "acb"]) == ["hm", None, "yes"]
    assert model.asked == ["a", "c", "b", "a", "c"]
    counts = own.take_counts()
    assert (counts["perf/judge_asked"], counts["perf/judge_remembered"]) == (7.0, 2.0)
    assert (counts["perf/judge_lost"], counts["perf/judge_unreadable"]) == (3.0, 2.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["judge: 2 of 3 requests: 1 x an unreadable reply, 'hm'; 1 x HTTP 500"] + [
        "judge: 2 of 2 requests: 1 x an unreadable reply, 'hm'; 1 x HTTP 500"
    ]


def test_a_kill_between_two_replies_keeps_the_first(path):
    def killed(requests, heard):
        heard(0, "yes")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clerk(killed, path).replies([ask("a"), ask("b")])
    assert clerk(Model(b="no"), path).replies([ask("a"), ask("b")]) == ["yes", "no"]


def test_processes_share_the_work_and_hear_everything(monkeypatch):
    """Three processes, one after another: what each sends is handed to it by the test."""
    requests = [ask(str(i)) for i in range(7)]
    model = Model(**{str(i): f"reply {i}" for i in range(6)})
    monkeypatch.setattr(clerk_module.jax, "process_count", lambda: 3)
    sent = []
    for index in range(3):
        monkeypatch.setattr(clerk_module.jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(processes, "exchange", lambda own: sent.append(own) or [own])
        together(model, requests, lambda *_: None)
    assert model.asked == list("0361425")
    monkeypatch.setattr(processes, "exchange", lambda own: sent)
    heard = {}
    replies = together(model, requests, lambda i, reply: heard.update({i: reply}))
    assert replies == (*(f"reply {i}" for i in range(6)), Lost(reason="HTTP 500"))
    assert heard == {i: f"reply {i}" for i in range(6)}
