"""The search tool: a query for an argument, passages for an observation."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sspjax.retrieval.client import RetrievalError, Retriever
from sspjax.tools.tool import Observation

log = logging.getLogger(__name__)


class SearchTool:
    """Looks up `topk` passages for each query."""

    def __init__(self, retriever: Retriever, topk: int) -> None:
        self._retriever = retriever
        self._topk = topk

    def run(self, arguments: Sequence[str]) -> list[Observation]:
        try:
            results = self._retriever.search(arguments, self._topk)
        except RetrievalError as error:
            log.warning("search failed for %d queries: %s", len(arguments), error)
            return [Observation(failed=True)] * len(arguments)
        return [
            Observation(failed=True) if documents is None else Observation(documents=documents)
            for documents in results
        ]
