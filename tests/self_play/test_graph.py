"""The graph against a small one whose answers are known by hand."""

import json

import pytest

from sspjax.self_play.graph import Entity, GraphError, KnowledgeGraph
from sspjax.types import Triple

ENTITIES = [
    Entity(id="curie", name="Marie Curie", aliases=("Maria Sklodowska",), kind="person"),
    Entity(id="paris", name="Paris", kind="city"),
    Entity(id="warsaw", name="Warsaw", kind="city"),
    Entity(id="france", name="France", kind="country"),
    Entity(id="sorbonne", name="Sorbonne"),
]

TRIPLES = [
    Triple(head="curie", relation="born", tail="warsaw"),
    Triple(head="curie", relation="lived", tail="warsaw"),
    Triple(head="curie", relation="lived", tail="paris"),
    Triple(head="curie", relation="works", tail="sorbonne"),
    Triple(head="sorbonne", relation="city", tail="paris"),
    Triple(head="paris", relation="country", tail="france"),
    Triple(head="france", relation="capital", tail="paris"),
]


@pytest.fixture(scope="module")
def graph() -> KnowledgeGraph:
    return KnowledgeGraph.of(ENTITIES, TRIPLES)


def test_names_put_the_canonical_one_first():
    assert ENTITIES[0].names == ("Marie Curie", "Maria Sklodowska")


def test_tail_is_the_one_tail(graph):
    assert graph.tail("curie", "born") == "warsaw"


def test_tail_is_none_where_there_is_none(graph):
    assert graph.tail("curie", "capital") is None
    assert graph.tail("nobody", "born") is None


def test_tail_is_none_where_there_are_several(graph):
    assert graph.tail("curie", "lived") is None
    assert graph.tails("curie", "lived") == ("warsaw", "paris")


def test_a_triple_given_twice_is_still_one_tail():
    twice = KnowledgeGraph.of(ENTITIES, [TRIPLES[0], TRIPLES[0]])
    assert twice.tail("curie", "born") == "warsaw"
    assert twice.heads("warsaw", "born") == ("curie",)


def test_heads_are_the_inverse(graph):
    assert graph.heads("paris", "city") == ("sorbonne",)
    assert graph.heads("paris", "lived") == ("curie",)
    assert graph.heads("warsaw", "city") == ()


def test_reach_follows_every_branch(graph):
    assert graph.reach("curie", ["works", "city", "country"]) == {"france"}
    assert graph.reach("curie", ["lived"]) == {"warsaw", "paris"}
    assert graph.reach("curie", ["lived", "country"]) == {"france"}
    assert graph.reach("curie", ["born", "country"]) == frozenset()


def test_paths_end_at_the_entity_and_start_anywhere(graph):
    assert list(graph.paths_to("sorbonne", 1)) == [(TRIPLES[3],)]
    assert set(graph.paths_to("france", 2)) == {
        (TRIPLES[2], TRIPLES[5]),
        (TRIPLES[4], TRIPLES[5]),
    }
    assert list(graph.paths_to("france", 3)) == [(TRIPLES[3], TRIPLES[4], TRIPLES[5])]
    assert list(graph.paths_to("france", 4)) == []


def test_paths_meet_no_entity_twice(graph):
    """france -> paris -> france would be a question that names its own answer."""
    starts = {path[0].head for path in graph.paths_to("france", 2)}
    assert "france" not in starts


def test_json_round_trip_through_text(graph):
    again = KnowledgeGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph
    assert again.entities["curie"].aliases == ("Maria Sklodowska",)


def test_json_without_a_field_is_named():
    with pytest.raises(GraphError, match="triples"):
        KnowledgeGraph.from_json({"entities": []})


def test_unknown_end_is_named():
    with pytest.raises(GraphError, match="'mars'"):
        KnowledgeGraph.of(ENTITIES, [Triple(head="curie", relation="born", tail="mars")])


def test_repeated_id_is_named():
    with pytest.raises(GraphError, match="'paris' is used twice"):
        KnowledgeGraph.of([*ENTITIES, Entity(id="paris", name="Paris, Texas")], [])
