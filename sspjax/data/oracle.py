"""Is a question's stated answer true? Read back against the knowledge graph it was made from.

For measurement only: nothing that is learnt from may look here, so only `metrics` imports it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sspjax.data import grammar
from sspjax.self_play.exact import exact_match
from sspjax.self_play.graph import KnowledgeGraph
from sspjax.types import Question

MAX_HOPS = 8
"""Longest chain that is followed: bounds the work on a text that repeats itself without end."""

Template = tuple[str, str, str]
"""What stands before the name, what stands after it, and the relation it asks for."""


class Oracle:
    """Reads questions of the mini-encyclopaedia's grammar, in either paraphrase set."""

    def __init__(self, graph: KnowledgeGraph) -> None:
        self._graph = graph
        self._ids: dict[str, frozenset[str]] = {}
        for entity in graph.entities.values():
            for name in entity.names:
                key = grammar.readable(name)
                self._ids[key] = self._ids.get(key, frozenset()) | {entity.id}
        sets = grammar.WORDINGS.values()
        self._questions = _templates((r, w.questions) for s in sets for r, w in s.items())
        self._phrases = _templates((r, w.phrases) for s in sets for r, w in s.items())

    def answers(self, text: str) -> frozenset[str]:
        """Ids of all entities that answer the question; none when it cannot be read.

        Case, spacing and the final mark do not matter; a name may be an alias.
        """
        text = grammar.readable(text)
        return self._followed(text, self._questions, MAX_HOPS)

    def correct(self, question: Question) -> bool:
        """True when the question can be read and the stated answer is its only one."""
        found = self.answers(question.text)
        if len(found) != 1:
            return False
        (answer,) = found
        return exact_match(question.answer, self._graph.entities[answer].names)

    def _named(self, phrase: str, hops: int) -> frozenset[str]:
        """Entities that a name or a noun phrase of at most `hops` relations stands for."""
        named = self._ids.get(phrase, frozenset())
        return named | self._followed(phrase, self._phrases, hops)

    def _followed(self, text: str, templates: tuple[Template, ...], hops: int) -> frozenset[str]:
        """Tails of every relation whose template fits, from whatever stands in its slot."""
        if hops == 0:
            return frozenset()
        found: set[str] = set()
        for before, after, relation in templates:
            fits = text.startswith(before) and text.endswith(after)
            if fits and len(text) > len(before) + len(after):
                subject = text[len(before) : len(text) - len(after)]
                for head in self._named(subject, hops - 1):
                    found.update(self._graph.tails(head, relation))
        return frozenset(found)


def _templates(worded: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[Template, ...]:
    found = []
    for relation, templates in worded:
        for template in templates:
            before, after = map(grammar.readable, template.split("{}"))
            found.append((before and before + " ", after and " " + after, relation))
    return tuple(found)
