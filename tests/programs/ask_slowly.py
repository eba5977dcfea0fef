"""Asks a run's agent through a search tool that takes its time: ask_slowly.py WORKDIR QUESTION."""

import dataclasses
import sys
import time

from sspjax.ask import alone, tell
from sspjax.players import Players
from sspjax.reopen import recorded_config, reopen

SECONDS = 1.0


class Slow:
    """A retriever with a delay."""

    def __init__(self, retriever):
        self._retriever = retriever

    def search(self, queries, topk):
        time.sleep(SECONDS)
        return self._retriever.search(queries, topk)


if __name__ == "__main__":
    workdir, question = sys.argv[1:]
    setup = reopen(alone(recorded_config(workdir)), workdir)
    slow = Slow(setup.retriever)
    players = Players(setup.config, setup.decoder, setup.layout, setup.tokenizer, slow)
    tell(dataclasses.replace(setup, players=players), None, question, temperature=0.0)
