"""The oracle reads every question the grammar can ask, and believes no other."""

import itertools
import random

import pytest

from sspjax.data import grammar
from sspjax.data.miniwiki import World, make_world
from sspjax.data.oracle import Oracle
from sspjax.self_play.graph import Entity, KnowledgeGraph
from sspjax.types import Question, Triple


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(11)


@pytest.fixture(scope="module")
def oracle(world) -> Oracle:
    return Oracle(world.graph)


def asked(text: str, answer: str) -> Question:
    return Question(uid="q", text=text, answer=answer)


def chains(hops: int) -> list[tuple[str, ...]]:
    """Every chain of relations in which each one starts at the kind the one before ends at."""
    relations = grammar.RELATIONS
    return [
        chain
        for chain in itertools.product(relations, repeat=hops)
        if all(relations[a].tail == relations[b].head for a, b in itertools.pairwise(chain))
    ]


@pytest.mark.parametrize("paraphrase", ["templates", "free"])
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_every_wording_of_every_chain_is_read(world, oracle, hops, paraphrase):
    rng = random.Random(hops)
    for chain in chains(hops):
        kind = grammar.RELATIONS[chain[0]].head
        start = rng.choice([e for e in world.graph.entities.values() if e.kind == kind])
        answer = start.id
        for relation in chain:
            answer = world.graph.tail(answer, relation)
        for text in grammar.phrasings(start.name, chain, paraphrase):
            assert oracle.answers(text) == {answer}, text


@pytest.mark.parametrize("paraphrase", ["templates", "free"])
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_every_question_of_the_world_is_true(world, oracle, hops, paraphrase):
    """All of them up to two hops, a sample of the others."""
    questions = world.questions(hops, random.Random(0), paraphrase)
    for q in itertools.islice(questions, 0, None, (1, 1, 7, 23)[hops - 1]):
        assert oracle.correct(asked(q.text, q.answer)), q.text


def test_sets_may_be_mixed_in_one_question(world, oracle):
    for path in itertools.islice(world.graph.paths_to(world.answers[0].uid, 3), 20):
        text = world.graph.entities[path[0].head].name
        for triple, name in zip(path[:-1], ("templates", "free"), strict=True):
            text = grammar.WORDINGS[name][triple.relation].phrases[0].replace("{}", text)
        text = grammar.WORDINGS["templates"][path[-1].relation].questions[1].replace("{}", text)
        assert oracle.answers(text) == {path[-1].tail}


def test_another_answer_is_wrong(world, oracle):
    rng = random.Random(0)
    names = [seed.answer for seed in world.answers]
    for q in itertools.islice(world.questions(2, rng), 0, None, 10):
        wrong = rng.choice([name for name in names if name != q.answer])
        assert not oracle.correct(asked(q.text, wrong))


def test_corrupted_questions_are_wrong(world, oracle):
    rng = random.Random(1)
    for q in itertools.islice(world.questions(2, rng), 0, None, 10):
        words = q.text.split()
        start = world.graph.entities[q.path[0].head].name
        cut = rng.randrange(len(words) - 1)
        corrupted = [
            q.text.replace(start, "Nobody Known"),
            q.text.replace(start, start.split()[0] + "x"),
            q.text.replace(start, ""),
            " ".join(words[:cut] + words[cut + 1 :]),
            " ".join(reversed(words)),
            " ".join(words + words),
            "is " + q.text,
        ]
        for text in corrupted:
            assert not oracle.correct(asked(text, q.answer)), text


def test_a_relation_that_does_not_apply_is_wrong(world, oracle):
    """Well-formed, about real entities, and asking for nothing that exists."""
    person = next(e for e in world.graph.entities.values() if e.kind == "person")
    city = world.graph.entities[world.graph.tail(person.id, "born")]
    assert oracle.answers(f"where was {person.name} born ?") == {city.id}
    assert oracle.answers(f"who founded {person.name} ?") == frozenset()
    assert oracle.answers(f"who founded the birthplace of {person.name} ?") == frozenset()


def test_the_question_of_another_relation_is_wrong(world, oracle):
    film = next(e for e in world.graph.entities.values() if e.kind == "film")
    director = world.graph.entities[world.graph.tail(film.id, "director")].name
    assert oracle.correct(asked(f"who directed {film.name} ?", director))
    assert not oracle.correct(asked(f"what company produced {film.name} ?", director))


@pytest.mark.parametrize("text", ["", " ", "?", "who founded ?", "who founded", "who", "the"])
def test_nothing_is_no_question(oracle, text):
    assert oracle.answers(text) == frozenset()


def test_spacing_case_and_the_final_mark_do_not_matter(world, oracle):
    q = next(world.questions(2, random.Random(3)))
    for text in (
        q.text.upper(),
        q.text.replace(" ?", "?"),
        q.text.removesuffix(" ?"),
        "  " + q.text.replace(" ", "   ") + "\n",
    ):
        assert oracle.correct(asked(text, q.answer)), text


def test_aliases_are_names(world, oracle):
    graph = world.graph
    triple = next(
        t
        for t in graph.triples
        if graph.entities[t.head].aliases and graph.entities[t.tail].aliases
    )
    head, tail = graph.entities[triple.head], graph.entities[triple.tail]
    template = grammar.WORDINGS["templates"][triple.relation].questions[0]
    text = template.replace("{}", head.aliases[0])
    assert oracle.correct(asked(text, tail.name))
    assert oracle.correct(asked(text, tail.aliases[0]))
    assert oracle.correct(asked(text, f"the {tail.aliases[0].upper()}."))
    assert not oracle.correct(asked(text, head.name))


def test_two_answers_are_none():
    """In a graph that is not functional a question with two answers is not true."""
    entities = [
        Entity(id="c", name="Metron Labs", kind="company"),
        Entity(id="a", name="Bora Fervik", kind="person"),
        Entity(id="b", name="Milen Pandal", kind="person"),
        Entity(id="x", name="Kolmar Bay", kind="city"),
    ]
    triples = [
        Triple(head="c", relation="founder", tail="a"),
        Triple(head="c", relation="founder", tail="b"),
        Triple(head="a", relation="born", tail="x"),
        Triple(head="b", relation="born", tail="x"),
    ]
    oracle = Oracle(KnowledgeGraph.of(entities, triples))
    assert oracle.answers("who founded Metron Labs ?") == {"a", "b"}
    assert not oracle.correct(asked("who founded Metron Labs ?", "Bora Fervik"))
    assert oracle.correct(asked("where was the founder of Metron Labs born ?", "Kolmar Bay"))


def test_a_shared_name_is_ambiguous():
    entities = [
        Entity(id="f", name="Padane Farune", kind="film"),
        Entity(id="g", name="Bezene Purune", aliases=("Padane Farune",), kind="film"),
        Entity(id="a", name="Bora Fervik", kind="person"),
        Entity(id="b", name="Milen Pandal", kind="person"),
    ]
    triples = [
        Triple(head="f", relation="director", tail="a"),
        Triple(head="g", relation="director", tail="b"),
    ]
    oracle = Oracle(KnowledgeGraph.of(entities, triples))
    assert oracle.answers("who directed Padane Farune ?") == {"a", "b"}
    assert oracle.correct(asked("who directed Bezene Purune ?", "Milen Pandal"))


def test_endless_repetition_is_unreadable_not_fatal(oracle):
    text = "who founded " + "the founder of " * 5000 + "Metron Labs ?"
    assert oracle.answers(text) == frozenset()
