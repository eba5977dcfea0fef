import numpy as np
import pytest
from chat_server import Reply, serving, text

from sspjax.config import JudgeConfig, VerifyConfig
from sspjax.judges.chat import Chat
from sspjax.judges.clerk import Clerk
from sspjax.judges.journal import Journal
from sspjax.judges.reader import ChatReader
from sspjax.types import Act, Message, Prompt, Question, Role, Stop

ASKED = Question(uid="q", text="Which city is it?", answer="Oslo")


def prompt(group, *documents):
    return Prompt(
        role=Role.READER,
        subject=ASKED,
        group=group,
        messages=(
            Message(author="system", content="Be short."),
            Message(author="user", content=" ".join(documents)),
        ),
        token_ids=np.zeros(5, np.int32),
    )


def read(service, prompts, path, randomness=(0, 0, 1)):
    chat = Chat(service.url, tries=1, timeout=30.0, concurrency=1)
    clerk = Clerk("reader", chat.complete, Journal(path, records=True), bool)
    reader = ChatReader(clerk, JudgeConfig(model="m"), VerifyConfig())
    return reader.read(prompts, randomness=randomness)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "reader.jsonl"


def test_what_the_model_is_told_and_what_comes_of_it(path):
    with serving(lambda r: text("It is north. <answer> Oslo </answer> Bye")) as service:
        (reading,) = read(service, [prompt("q/verify/0", "Passage.")], path)
    (request,) = service.requests
    seed = request.pop("seed")
    assert 0 <= seed < 2**31
    assert request == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Passage."},
        ],
        "temperature": 0.1,
        "max_tokens": 70,
    }
    assert (reading.uid, reading.stop, reading.answer) == (
        "reader/q/verify/0/0", Stop.ANSWER, "Oslo",
    )  # fmt: skip
    (turn,) = reading.turns
    assert (turn.act, turn.sampled, len(turn.token_ids)) == (Act.ANSWER, False, 0)
    assert turn.text == "It is north. <answer> Oslo </answer> Bye"


def test_no_answer_is_an_answer_but_no_reply_is_a_failure(path):
    def script(request):
        content = request["messages"][-1]["content"]
        return {"mute": text("I do not know"), "down": Reply(status=400)}.get(
            content, text("<answer>x</answer>")
        )

    with serving(script) as service:
        readings = read(service, [prompt(n, n) for n in ("mute", "down", "fine")], path)
    assert [(r.answer, r.failed) for r in readings] == [(None, False), (None, True), ("x", False)]
    assert [r.stop for r in readings] == [Stop.NO_ACTION, Stop.TOOL_FAILED, Stop.ANSWER]


def test_readings_are_drawn_by_their_names_and_never_twice(path):
    """Equal prompts of two samples are two draws; the same step again is the same draw."""
    draws = []

    def script(request):
        draws.append(request["seed"])
        return text(f"<answer>{len(draws)}</answer>")

    prompts = [prompt("q/verify/0", "p"), prompt("q/verify/1", "p")]
    with serving(script) as service:
        first = read(service, prompts, path)
        again = read(service, prompts, path)
        later = read(service, prompts, path, randomness=(0, 0, 2))
    assert [r.answer for r in first] == [r.answer for r in again] == ["1", "2"]
    assert [r.answer for r in later] == ["3", "4"]
    assert len(set(draws)) == 4
