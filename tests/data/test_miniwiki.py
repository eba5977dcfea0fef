"""The encyclopaedia keeps its promises: every fact stands where it is said to stand."""

import gzip
import json
import random
import re
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sspjax.data import grammar
from sspjax.data.answers import DataError, read_answers, read_questions
from sspjax.data.miniwiki import (
    World,
    evaluation_questions,
    iter_passages,
    load_graph,
    main,
    make_world,
    write_world,
)
from sspjax.data.names import SMALL_WORLD, shared_words


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(0)


@pytest.fixture(scope="module")
def passages(world) -> dict[str, str]:
    return {d.id: d.text for d in world.documents()}


def says(text: str, phrase: str) -> bool:
    return f" {phrase} " in f" {text} "


# The world ----------------------------------------------------------------------------------------


def test_proportions_of_the_default_world(world):
    kinds = [entity.kind for entity in world.graph.entities.values()]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"person": 360, "city": 130, "company": 150, "film": 220, "country": 20}


@pytest.mark.parametrize("entities", [40, 41, 100, 999, 2000])
def test_any_size_is_met_exactly(entities):
    assert len(make_world(3, entities).graph.entities) == entities


def test_a_seed_gives_one_world(world, passages):
    again = make_world(0)
    assert again == world
    assert {d.id: d.text for d in again.documents()} == passages


def test_a_world_is_the_same_in_another_process(world):
    """String hashing differs between processes; nothing may depend on it."""
    code = (
        "from sspjax.data.miniwiki import make_world\n"
        "w = make_world(0)\n"
        "print([d.text for d in w.documents()][::100], w.answers[::100])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [d.text for d in world.documents()][::100], world.answers[::100]
    assert out.stdout.strip() == f"{here[0]} {here[1]}"


def test_seeds_give_different_worlds(world):
    other = make_world(1)
    names = {e.name for e in world.graph.entities.values()}
    others = {e.name for e in other.graph.entities.values()}
    assert len(names & others) < 0.5 * len(names)
    facts = {(t.head, t.relation, t.tail) for t in world.graph.triples}
    shared = sum((t.head, t.relation, t.tail) in facts for t in other.graph.triples)
    assert shared < 0.05 * len(facts)


def test_names_and_aliases_are_unique(world):
    strings = [s.lower() for e in world.graph.entities.values() for s in e.names]
    assert len(set(strings)) == len(strings)


def test_relations_are_functional_and_typed(world):
    graph = world.graph
    assert len(grammar.RELATIONS) >= 9
    for entity in graph.entities.values():
        relations = [t.relation for t in graph.outgoing[entity.id]]
        assert tuple(relations) == grammar.relations_of(entity.kind)
        for relation in relations:
            tail = graph.tail(entity.id, relation)
            assert graph.entities[tail].kind == grammar.RELATIONS[relation].tail


def test_a_capital_lies_in_its_country(world):
    for entity in world.graph.entities.values():
        if entity.kind == "country":
            capital = world.graph.tail(entity.id, "capital")
            assert world.graph.tail(capital, "country") == entity.id


# Passages -----------------------------------------------------------------------------------------


def test_passages_are_short_and_start_with_their_title(world):
    lengths = []
    for document in world.documents():
        assert document.text.startswith(document.title + " ")
        assert document.title == world.graph.entities[document.id].name
        lengths.append(len(document.text.split()))
    assert min(lengths) >= 16 and max(lengths) <= 34
    assert 23 <= sum(lengths) / len(lengths) <= 26


def test_every_word_stands_between_single_spaces(world):
    questions = [q for h in (1, 2) for q in evaluation_questions(world, h, 100, 0)]
    for text in [d.text for d in world.documents()] + [q.text for q in questions]:
        assert all(re.fullmatch(r"[A-Za-z]+|[.,?]", word) for word in text.split(" "))


def test_every_fact_stands_in_the_passage_of_its_head(world, passages):
    for triple in world.graph.triples:
        mention = world.mention(triple)
        assert mention in world.graph.entities[triple.tail].names
        stated = [f.replace("{}", mention) for f in grammar.RELATIONS[triple.relation].facts]
        assert any(says(passages[triple.head], s) for s in stated)


def test_a_passage_says_nothing_else(world, passages):
    """No name but those of its own facts: a reader cannot be misled."""
    owners = {n: e.id for e in world.graph.entities.values() for n in e.names}
    for head, text in list(passages.items())[::20]:
        words = text.split()
        pairs = [" ".join(pair) for pair in zip(words, words[1:], strict=False)]
        spoken = {owners[s] for s in (*words, *pairs) if s in owners}
        assert spoken == {head, *(t.tail for t in world.graph.outgoing[head])}


def test_aliases_are_introduced_at_home_and_used_elsewhere(world, passages):
    elsewhere = 0
    for entity in world.graph.entities.values():
        for alias in entity.aliases:
            assert says(passages[entity.id], alias)
            mentions = {t.head for t in world.graph.incoming[entity.id]}
            elsewhere += any(says(passages[head], alias) for head in mentions)
    assert elsewhere >= 0.3 * len(world.graph.entities)


def test_passages_vary_in_wording_and_order(passages):
    people = [text for key, text in passages.items() if key.startswith("person")]
    assert 0.25 < sum("was born in" in text for text in people) / len(people) < 0.75
    born_first = sum(
        min(text.find(f) for f in ("was born", "is a native") if f in text) < 30 for text in people
    )
    assert 0.15 < born_first / len(people) < 0.85


def test_streamed_passages_are_the_worlds(world, passages):
    assert {d.id: d.text for d in iter_passages(0, 880)} == passages


# Words --------------------------------------------------------------------------------------------


def test_small_worlds_share_one_list_of_words():
    known = set(shared_words())
    language = set()
    for seed, entities in ((0, 880), (1, 880), (7, SMALL_WORLD)):
        world = make_world(seed, entities)
        texts = [d.text for d in world.documents()]
        texts += [q.text for q in world.questions(1, random.Random(0))]
        words = {word for text in texts for word in text.split()}
        assert {word for word in words if word[0].isupper()} <= known
        language |= {word for word in words if not word[0].isupper()}
    assert 520 <= len(known | language) <= 640


def test_larger_worlds_add_words():
    world = make_world(0, 2 * SMALL_WORLD)
    words = {word for e in world.graph.entities.values() for n in e.names for word in n.split()}
    assert words - set(shared_words())


def test_a_small_tokenizer_knows_every_word():
    """Trained on other worlds, it writes each word of this one as one token."""

    def texts(seed):
        world = make_world(seed)
        yield from (" " + d.text for d in world.documents())
        yield from (" " + q.text for q in world.questions(1, random.Random(seed)))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t for s in range(100, 110) for t in texts(s)), trainer)
    words = {word for text in texts(0) for word in text.split()}
    split = {word for word in words if len(tokenizer.encode(" " + word).ids) > 1}
    assert not split


# Questions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("paraphrase", ["templates", "free"])
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_evaluation_questions_are_many_true_and_held_out(world, passages, hops, paraphrase):
    questions = evaluation_questions(world, hops, 250, 0, paraphrase)
    assert len(questions) == 250
    assert len({q.text for q in questions}) == 250
    held_out = {seed.answer for seed in world.held_out_answers}
    for q in questions:
        assert q.answer in held_out
        assert q.hops == len(q.path) == len(q.evidence) == hops
        entity = world.graph.entities[q.path[0].head]
        for triple, document, following in zip(
            q.path, q.evidence, (*q.path[1:], None), strict=True
        ):
            assert document == entity.id
            entity = world.graph.entities[world.graph.tail(entity.id, triple.relation)]
            assert any(says(passages[document], name) for name in entity.names)
            assert following is None or following.head == entity.id
        assert (entity.name, entity.aliases) == (q.answer, q.aliases)
        assert says(q.text, world.graph.entities[q.path[0].head].name)
        assert not any(says(q.text, name) for name in entity.names)


def test_evaluation_questions_cover_the_held_out_answers(world):
    """Round by round: nobody is asked about twice before everybody was asked about once."""
    questions = evaluation_questions(world, 1, 250, 0)
    assert len({q.answer for q in questions}) == min(250, len(world.held_out_answers))
    assert len(evaluation_questions(world, 1, 10**6, 0)) > len(world.held_out_answers)


def test_paraphrase_sets_ask_for_the_same_facts_in_other_words(world):
    plain = evaluation_questions(world, 2, 50, 0)
    free = evaluation_questions(world, 2, 50, 0, "free")
    assert [q.path for q in plain] == [q.path for q in free]
    assert not {q.text for q in plain} & {q.text for q in free}
    for relation in grammar.RELATIONS:
        used, unused = (grammar.WORDINGS[s][relation] for s in ("templates", "free"))
        assert len(used.questions) >= 2
        assert len(unused.questions) > len(used.questions)
        assert len(unused.phrases) > len(used.phrases)
        assert not set(used.questions) & set(unused.questions)
        assert not set(used.phrases) & set(unused.phrases)


def test_substitution_nests_from_the_inside():
    text = next(grammar.phrasings("Bora Fervik", ["works", "founder"]))
    assert text == "who founded the employer of Bora Fervik ?"


def test_an_unknown_paraphrase_set_is_named():
    with pytest.raises(ValueError, match="paraphrase='fancy'.*templates, free"):
        grammar.phrase_question("Bora", ["born"], random.Random(0), "fancy")


def test_questions_about_an_answer_name_it_alone(world):
    rng = random.Random(0)
    seed = world.answers[0]
    for hops in range(1, 5):
        for q in world.questions_about(seed.uid, hops, rng):
            relations = [t.relation for t in q.path]
            assert world.graph.reach(q.path[0].head, relations) == {seed.uid}
            entities = [q.path[0].head, *(t.tail for t in q.path)]
            assert len(set(entities)) == hops + 1


# Seeds --------------------------------------------------------------------------------------------


def test_held_out_answers_are_no_seeds(world):
    train = {s for seed in world.answers for s in (seed.answer, *seed.aliases)}
    held = {s for seed in world.held_out_answers for s in (seed.answer, *seed.aliases)}
    assert not train & held
    total = len(world.answers) + len(world.held_out_answers)
    assert abs(len(world.held_out_answers) / total - 0.35) < 0.01


def test_a_seed_asks_for_no_more_hops_than_there_are(world):
    deep = make_world(0, hops=4)
    assert {seed.hops for seed in world.answers} == {1, 2}
    assert {seed.hops for seed in deep.answers} == {1, 2, 3, 4}
    for seed in deep.answers:
        assert any(deep.paths_about(seed.uid, seed.hops))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"entities": 39}, "entities=39"),
        ({"held_out": 0.0}, "held_out=0.0"),
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"hops": 0}, "hops=0"),
        ({"hops": 5}, "hops=5"),
    ],
)
def test_arguments_that_make_no_world(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_world(0, **arguments)


# Files --------------------------------------------------------------------------------------------


def test_files_hold_the_world(tmp_path):
    world = make_world(5, 200)
    write_world(world, tmp_path, count=20)
    with gzip.open(tmp_path / "corpus.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert rows == [{"id": d.id, "title": d.title, "text": d.text} for d in world.documents()]
    assert load_graph(tmp_path) == world.graph
    assert read_answers(tmp_path / "answers.jsonl") == world.answers
    for hops in (1, 2):
        path = tmp_path / "questions" / f"{hops}hop.jsonl"
        made = evaluation_questions(world, hops, 20, 5)
        read = read_questions(path)
        assert [(q.text, q.answer, q.aliases) for q in read] == [
            (q.text, q.answer, q.aliases) for q in made
        ]
        gold = [json.loads(line)["gold"] for line in path.read_text().splitlines()]
        assert gold == [list(q.evidence) for q in made]
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_same_world_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        main(["--seed", "2", "--entities", "60", "--questions", "5", "--out", str(tmp_path / name)])
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_fewer_questions_than_asked_for_is_said(tmp_path, caplog):
    write_world(make_world(0, 40), tmp_path, count=5000)
    assert "1-hop: the world has" in caplog.text


def test_graphs_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_graph(tmp_path)
    path = tmp_path / "graph.json.gz"
    path.write_bytes(gzip.compress(b'{"grammar": 0, "entities": [], "triples": []}'))
    with pytest.raises(DataError, match="grammar 0.*make the world anew"):
        load_graph(tmp_path)
    path.write_bytes(gzip.compress(b'{"grammar": 1'))
    with pytest.raises(DataError, match="broken"):
        load_graph(tmp_path)
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="broken"):
        load_graph(tmp_path)


def test_writing_is_fast_enough_for_a_million(tmp_path):
    """At most three CPU-minutes a million, that is 180 microseconds a passage, files included."""
    start = time.process_time()
    main(["--entities", "20000", "--out", str(tmp_path)])
    seconds = time.process_time() - start
    with gzip.open(tmp_path / "corpus.jsonl.gz", "rt") as file:
        titles = {json.loads(line)["title"] for line in file}
    assert len(titles) == 20_000
    assert seconds < 20_000 * 180e-6


@pytest.mark.slow
def test_a_million_passages(tmp_path):
    """At most three CPU-minutes and 2 GB, files included."""
    code = (
        "import resource, sys\n"
        "from sspjax.data.miniwiki import main\n"
        "main(['--entities', '1000000', '--out', sys.argv[1]])\n"
        "use = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(use.ru_utime + use.ru_stime, use.ru_maxrss)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    cpu_seconds, peak_kib = map(float, out.stdout.split())
    assert cpu_seconds < 180
    assert peak_kib * 1024 < 2e9
    names = set()
    with gzip.open(tmp_path / "corpus.jsonl.gz", "rt") as file:
        for line in file:
            names.add(json.loads(line)["title"])
    assert len(names) == 1_000_000
