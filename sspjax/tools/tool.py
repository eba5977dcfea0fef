"""The contract of every tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sspjax.types import Document, noun


@noun
class Observation:
    """What a tool answered to one argument."""

    documents: tuple[Document, ...] = ()
    """Best first; empty when nothing was found, which is an answer."""
    failed: bool = False
    """The tool gave no answer: the trajectory is neither trained on nor scored."""


class Tool(Protocol):
    """A batched tool. It is called from a thread of its own, never twice at a time."""

    def run(self, arguments: Sequence[str]) -> list[Observation]:
        """One observation for each argument, in order; failures are observations, not raised."""
        ...
