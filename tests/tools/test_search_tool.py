"""The search tool: one observation an argument, failures told from empty results."""

import pytest

from sspjax.config import ConfigError
from sspjax.retrieval.client import RetrievalError
from sspjax.tools.kit import TOOLS, equip
from sspjax.tools.search import SearchTool
from sspjax.tools.tool import Observation
from sspjax.types import Act, Document

ADA = Document(id="ada", title="Ada", text="Wrote a program.")


class Scripted:
    """A retriever with known answers; None fails one query, "down" fails the call."""

    def __init__(self):
        self.calls = []

    def search(self, queries, topk):
        self.calls.append((list(queries), topk))
        if "down" in queries:
            raise RetrievalError("connection refused")
        known = {"ada": (ADA,), "nothing": (), "flaky": None}
        return [known[query] for query in queries]


def test_one_batch_one_observation_for_each_argument():
    retriever = Scripted()
    tool = SearchTool(retriever, 5)
    assert tool.run(["ada", "nothing", "flaky"]) == [
        Observation(documents=(ADA,)),
        Observation(documents=()),
        Observation(failed=True),
    ]
    assert retriever.calls == [(["ada", "nothing", "flaky"], 5)]
    assert tool.run([]) == []


def test_a_retriever_that_is_down_fails_every_argument_and_says_so(caplog):
    observations = SearchTool(Scripted(), 3).run(["ada", "down"])
    assert observations == [Observation(failed=True)] * 2
    assert "search failed for 2 queries: connection refused" in caplog.text


def test_other_errors_are_not_swallowed():
    with pytest.raises(KeyError):
        SearchTool(Scripted(), 3).run(["unheard of"])


def test_tools_are_equipped_under_their_acts():
    retriever = Scripted()
    tools = equip(("search",), retriever=retriever, topk=2)
    assert list(tools) == [Act.SEARCH]
    tools[Act.SEARCH].run(["ada"])
    assert retriever.calls == [(["ada"], 2)]
    assert equip((), retriever=retriever, topk=2) == {}
    with pytest.raises(ConfigError, match="unknown tool 'browse'; expected any of: search"):
        equip(("search", "browse"), retriever=retriever, topk=2)


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_an_act(name):
    assert Act(name).value == name
