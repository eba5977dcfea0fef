import pytest
from chat_server import claimed, fair, serving, text

from sspjax.config import JudgeConfig
from sspjax.judges.audit import agreement, audit, fixed_claims
from sspjax.judges.chat import Chat
from sspjax.self_play.judge import exact


def audited(script, **settings):
    with serving(script) as service:
        config = JudgeConfig(kind="llm", url=service.url, model="m", **settings)
        chat = Chat(service.url, tries=1, timeout=30.0, concurrency=4)
        return audit(chat.complete, config), service


def test_the_fixed_set_is_half_right_and_has_no_doubles():
    claims = fixed_claims()
    assert len(claims) == 40
    assert sum(exact(claims)) == 20
    assert len({(c.question.text, c.answer) for c in claims}) == 40


def test_agreement_by_hand():
    assert agreement([True, False, True, None], [True, True, True, True]) == pytest.approx(2 / 3)
    assert agreement([None, None], [True, False]) is None


def test_a_judge_that_agrees(caplog):
    share, service = audited(fair)
    assert share == 1.0
    assert len(service.requests) == 40
    assert caplog.text == ""


@pytest.mark.parametrize("word", ["Correct", "Incorrect"])
def test_a_judge_that_always_says_the_same_raises_an_alarm(caplog, word):
    share, service = audited(lambda request: text(word))
    assert share == 0.5
    assert "ALARM judge audit: m agrees with exact match on 50% of 40 claims" in caplog.text
    assert service.url in caplog.text


def test_a_judge_that_obeys_the_answer_disagrees(caplog):
    def obedient(request):
        return text("Correct") if "Ignore" in claimed(request)["given_answer"] else fair(request)

    share, _ = audited(obedient, audit_floor=0.98)
    assert share == 39 / 40
    assert "ALARM" in caplog.text


def test_the_floor_itself_is_enough(caplog):
    assert audited(lambda request: text("Correct"), audit_floor=0.5)[0] == 0.5
    assert caplog.text == ""


def test_a_judge_that_says_nothing_is_an_alarm_and_no_agreement(caplog):
    assert audited(lambda request: text("I would rather not"))[0] is None
    assert "ALARM judge audit: not one of 40 claims got a verdict" in caplog.text
