import pytest
from chat_server import Reply, fair, serving, text

from sspjax.command_line import load_config
from sspjax.config import ConfigError
from sspjax.judges.llm import LlmJudge
from sspjax.judges.referee import JudgeError, open_referee
from sspjax.self_play.judge import Claim, exact
from sspjax.types import Question

TINY = "configs/tiny.py"


def config(url="http://127.0.0.1:9/v1", **settings):
    given = {"kind": "llm", "url": url, "model": "m", "tries": 1, "backoff": 0, **settings}
    return load_config(TINY, [(f"judge.{key}", str(value)) for key, value in given.items()])


@pytest.fixture(autouse=True)
def _here(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_exact_match_asks_nobody_and_leaves_nothing(tmp_path):
    referee = open_referee(load_config(TINY), tmp_path / "judge", records=True)
    referee.check()
    assert (referee.judge, referee.reader, referee.take_counts()) == (exact, None, {})
    assert referee.audit(0) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_judge_and_a_reader(tmp_path):
    with serving(fair) as service:
        own = load_config(
            TINY,
            [("judge.url", service.url), ("judge.model", "m"), ("judge.kind", "llm")]
            + [("verify.reader", "judge"), ("judge.audit_every", "3")],
        )
        referee = open_referee(own, tmp_path / "judge", records=True)
        referee.check()
        assert isinstance(referee.judge, LlmJudge)
        claim = Claim(question=Question(uid="q", text="?", answer="Oslo"), answer="Bergen")
        assert list(referee.judge([claim])) == [False]
        assert [referee.audit(step) for step in (1, 2, 3)] == [{}, {}, {"judge/audit_agreement": 1}]
    assert referee.reader is not None
    assert sorted(referee.take_counts()) == sorted(
        f"perf/{name}_{key}"
        for name in ("judge", "reader")
        for key in ("asked", "remembered", "lost", "unreadable")
    )
    # Neither the greeting nor the audit is remembered.
    assert len((tmp_path / "judge" / "judge.jsonl").read_text().splitlines()) == 1


def test_a_reader_alone_judges_by_exact_match(tmp_path):
    own = load_config(
        TINY, [("verify.reader", "judge"), ("judge.url", "http://h/v1"), ("judge.model", "m")]
    )
    referee = open_referee(own, tmp_path, records=False)
    assert (referee.judge, referee.audit(0)) == (exact, {})
    assert referee.reader is not None


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(status=404, body=b'{"detail": "Not Found"}'), "HTTP 404"),
        (Reply(status=500), "HTTP 500"),
        (Reply(body=b"hello"), "no chat completion"),
        (Reply(hang_up=True), "disconnected"),
    ],
)
def test_a_judge_that_does_not_answer_is_told_at_the_start(tmp_path, reply, words):
    with serving(lambda request: reply) as service:
        referee = open_referee(config(service.url), tmp_path, records=True)
        with pytest.raises(JudgeError, match=f"{service.url}: m does not answer: .*{words}"):
            referee.check()


def test_the_key_comes_from_the_environment(tmp_path):
    with serving(lambda request: text("Ready")) as service:
        own = config(service.url, api_key_variable="JUDGE_KEY")
        open_referee(own, tmp_path, records=True, environ={"JUDGE_KEY": " abc\n"}).check()
    assert service.headers[0]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize("value", ["", "  ", "se\ncret", "gehëim"])
def test_a_key_that_is_missing_or_none(tmp_path, value):
    own = config(api_key_variable="JUDGE_KEY")
    with pytest.raises(JudgeError, match="JUDGE_KEY") as told:
        open_referee(own, tmp_path, records=True, environ={"JUDGE_KEY": value})
    assert not value.strip() or value not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, r"config.judge.url='': judge.kind=llm needs it"),
        ({"model": ""}, r"config.judge.model='': judge.kind=llm needs it"),
        ({"url": "localhost:8000/v1"}, "expected http://HOST:PORT/v1"),
        ({"url": "ftp://host/v1"}, "expected http://HOST:PORT/v1"),
        ({"url": "http://"}, "expected http://HOST:PORT/v1"),
        ({"url": "http://host:99999/v1"}, "expected http://HOST:PORT/v1"),
        ({"url": "http://[::1/v1"}, "expected http://HOST:PORT/v1"),
        ({"url": "http://höst/v1"}, "expected http://HOST:PORT/v1"),
        ({"url": "http://me:secret@host/v1"}, "config.judge.url: holds a name, a key or a query"),
        ({"url": "http://host/v1?key=secret"}, "config.judge.url: holds a name, a key or a query"),
        ({"api_key_variable": "sk-secret"}, "config.judge.api_key_variable: expected the name"),
        ({"kind": "oracle"}, "'oracle': expected one of exact, llm"),
        ({"tries": 0}, "judge.tries=0: must be at least 1"),
        ({"tries": 21}, "judge.tries=21: must be at most 20"),
        ({"timeout": 0}, "judge.timeout=0.0: must be at least 0.001"),
        ({"timeout": "inf"}, "judge.timeout=inf: must be at most 3600"),
        ({"timeout": "nan"}, "judge.timeout=nan: must be at least"),
        ({"concurrency": 0}, "judge.concurrency=0: must be at least 1"),
        ({"concurrency": 5000}, "judge.concurrency=5000: must be at most 1024"),
        ({"audit_floor": 2}, "judge.audit_floor=2.0: must be in 0..1"),
    ],
    ids=str,
)
def test_settings_that_cannot_run(settings, message):
    with pytest.raises(ConfigError, match=message) as told:
        config(**settings)
    assert "secret" not in str(told.value)
    assert "\n" not in str(told.value)
