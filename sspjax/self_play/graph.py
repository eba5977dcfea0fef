"""Knowledge graphs as values: entities, the triples that join them, and the paths between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sspjax.errors import UserError
from sspjax.types import Triple, noun

Path = tuple[Triple, ...]
"""Triples in which each one starts where the one before it ends."""


class GraphError(UserError, ValueError):
    """Entities and triples that do not make a graph."""


@noun
class Entity:
    """A node. Its name is what answers say; an alias is just as right."""

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    kind: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every accepted string, the canonical one first."""
        return (self.name, *self.aliases)


@noun
class KnowledgeGraph:
    """A directed graph with named relations; make it with `KnowledgeGraph.of`.

    Relations need not be functional: `tail` answers only where there is exactly one tail, `tails`
    and `reach` where there may be several. Order is that of the triples given, so every iteration
    is the same on every machine.
    """

    entities: Mapping[str, Entity]
    triples: tuple[Triple, ...]
    outgoing: Mapping[str, tuple[Triple, ...]]
    """By head. Entities that head no triple are absent."""
    incoming: Mapping[str, tuple[Triple, ...]]
    """By tail. Entities that no triple ends at are absent."""

    @classmethod
    def of(cls, entities: Iterable[Entity], triples: Iterable[Triple]) -> KnowledgeGraph:
        """Indexes the triples by both ends.

        Raises GraphError for an id that is used twice and for a triple with an unknown end.
        """
        by_id: dict[str, Entity] = {}
        for entity in entities:
            if entity.id in by_id:
                raise GraphError(
                    f"entity id {entity.id!r} is used twice ({by_id[entity.id].name!r} and "
                    f"{entity.name!r}); ids must be unique"
                )
            by_id[entity.id] = entity
        triples = tuple(triples)
        for triple in triples:
            for end in (triple.head, triple.tail):
                if end not in by_id:
                    raise GraphError(
                        f"triple ({triple.head}, {triple.relation}, {triple.tail}) names {end!r}, "
                        "which is no entity of the graph; add it or drop the triple"
                    )
        return cls(
            entities=by_id,
            triples=triples,
            outgoing=_grouped((t.head, t) for t in triples),
            incoming=_grouped((t.tail, t) for t in triples),
        )

    def tails(self, head: str, relation: str) -> tuple[str, ...]:
        """Ids that `relation` leads to from `head`, each once, in the order of the triples."""
        found = [t.tail for t in self.outgoing.get(head, ()) if t.relation == relation]
        return tuple(dict.fromkeys(found))

    def tail(self, head: str, relation: str) -> str | None:
        """The one id that `relation` leads to from `head`; None where there is none or several."""
        found = self.tails(head, relation)
        return found[0] if len(found) == 1 else None

    def heads(self, tail: str, relation: str) -> tuple[str, ...]:
        """Ids from which `relation` leads to `tail`, each once, in the order of the triples."""
        found = [t.head for t in self.incoming.get(tail, ()) if t.relation == relation]
        return tuple(dict.fromkeys(found))

    def reach(self, start: str, relations: Sequence[str]) -> frozenset[str]:
        """Every id that the chain of relations leads to from `start`.

        A chain names its end uniquely exactly when this has one element.
        """
        ends = {start}
        for relation in relations:
            ends = {tail for head in ends for tail in self.tails(head, relation)}
        return frozenset(ends)

    def paths_to(self, end: str, length: int) -> Iterator[Path]:
        """Every path of `length` triples that ends at `end` and meets no entity twice."""
        yield from self._paths(end, length, frozenset((end,)))

    def _paths(self, end: str, length: int, met: frozenset[str]) -> Iterator[Path]:
        if length == 0:
            yield ()
            return
        for triple in self.incoming.get(end, ()):
            if triple.head not in met:
                for before in self._paths(triple.head, length - 1, met | {triple.head}):
                    yield (*before, triple)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists: `{"entities": [row], "triples": [[head, relation, tail]]}`."""
        return {
            "entities": [entity_row(entity) for entity in self.entities.values()],
            "triples": [triple_row(triple) for triple in self.triples],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KnowledgeGraph:
        """The inverse of `to_json`. Raises GraphError where a field is missing."""
        try:
            entities = [
                Entity(id=r["id"], name=r["name"], aliases=tuple(r["aliases"]), kind=r["kind"])
                for r in data["entities"]
            ]
            triples = [Triple(head=h, relation=r, tail=t) for h, r, t in data["triples"]]
        except KeyError as missing:
            raise GraphError(
                f"graph without the field {missing}; was it made by to_json?"
            ) from None
        return cls.of(entities, triples)


def entity_row(entity: Entity) -> dict[str, Any]:
    """One entity as a JSON object."""
    return {
        "id": entity.id,
        "name": entity.name,
        "aliases": list(entity.aliases),
        "kind": entity.kind,
    }


def triple_row(triple: Triple) -> list[str]:
    """One triple as a JSON array."""
    return [triple.head, triple.relation, triple.tail]


def _grouped(pairs: Iterable[tuple[str, Triple]]) -> dict[str, tuple[Triple, ...]]:
    groups: dict[str, list[Triple]] = {}
    for key, triple in pairs:
        groups.setdefault(key, []).append(triple)
    return {key: tuple(group) for key, group in groups.items()}
