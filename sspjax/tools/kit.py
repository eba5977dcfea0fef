"""The tools there are, by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sspjax.config import ConfigError
from sspjax.retrieval.client import Retriever
from sspjax.tools.search import SearchTool
from sspjax.tools.tool import Tool
from sspjax.types import Act

TOOLS: Mapping[str, Callable[[Retriever, int], Tool]] = {"search": SearchTool}


def equip(names: Sequence[str], *, retriever: Retriever, topk: int) -> dict[Act, Tool]:
    """The named tools under the acts that call them, in order; ConfigError for an unknown name."""
    for name in names:
        if name not in TOOLS:
            raise ConfigError(f"tools: unknown tool {name!r}; expected any of: {', '.join(TOOLS)}")
    return {Act(name): TOOLS[name](retriever, topk) for name in names}
