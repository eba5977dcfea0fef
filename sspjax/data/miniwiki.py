"""A seeded synthetic encyclopaedia: a knowledge graph, a passage for each entity, and questions.

    python -m sspjax.data.miniwiki --seed 0 --entities 1000000 --out DIR

Everything follows from (seed, number of entities, shares): the same on every machine. An entity's
passage is named by the entity's id and states each of its facts once, so the evidence of a question
is the list of heads of its path. About a third of the entities have an alias: their own passage
introduces it, and at least one other passage speaks of them by the alias alone.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import logging
import math
import os
import pathlib
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sspjax.data import grammar
from sspjax.data.answers import DataError
from sspjax.data.names import draw_names
from sspjax.self_play.graph import Entity, KnowledgeGraph, Path, entity_row, triple_row
from sspjax.types import Document, Seed, Triple, noun

log = logging.getLogger(__name__)

PROPORTIONS = {"person": 360, "city": 130, "company": 150, "film": 220, "country": 20}
"""Entities of each kind in a world of 880. The number of countries grows with the square root."""

MIN_ENTITIES = 40
MAX_HOPS = 4
ALIAS_SHARE = 0.35
"""Share of each kind's entities that have an alias."""

ALIAS_EVERY = 4
"""Of the passages that mention an entity with an alias, the 1st, 5th, 9th, ... say the alias. Few,
so that a search for it finds the passage that explains it among the first results."""


@noun
class WorldQuestion:
    """A question that is true by construction, and why."""

    text: str
    answer: str
    aliases: tuple[str, ...]
    hops: int
    path: Path
    """From the entity the question names to the answer."""
    evidence: tuple[str, ...]
    """Ids of the documents that state the facts of `path`, in its order."""


@noun
class World:
    """One mini-encyclopaedia."""

    seed: int
    hops: int
    """Longest chain its seeds ask for."""
    graph: KnowledgeGraph
    answers: tuple[Seed, ...]
    """What self-play starts from; a seed's uid is the entity's id."""
    held_out_answers: tuple[Seed, ...]
    """Never seeds: evaluation questions are about these alone."""

    def document(self, entity_id: str) -> Document:
        """The passage of an entity; its id is the entity's."""
        entity = self.graph.entities[entity_id]
        facts = [(t.relation, self.mention(t)) for t in self.graph.outgoing.get(entity_id, ())]
        alias = entity.aliases[0] if entity.aliases else None
        rng = _stream(self.seed, "passage", entity_id)
        text = grammar.write_passage(entity.kind, entity.name, alias, facts, rng)
        return Document(id=entity_id, title=entity.name, text=text)

    def documents(self) -> Iterator[Document]:
        """Every passage, one for each entity, made on the way."""
        return map(self.document, self.graph.entities)

    def mention(self, triple: Triple) -> str:
        """How the passage that states the triple writes its tail: by name or by alias."""
        tail = self.graph.entities[triple.tail]
        if not tail.aliases:
            return tail.name
        place = self.graph.incoming[triple.tail].index(triple)
        return tail.name if place % ALIAS_EVERY else tail.aliases[0]

    def paths_about(self, entity_id: str, hops: int) -> Iterator[Path]:
        """Every path of `hops` relations that has the entity as its only answer."""
        for path in self.graph.paths_to(entity_id, hops):
            if len(self.graph.reach(path[0].head, [t.relation for t in path])) == 1:
                yield path

    def questions_about(
        self, entity_id: str, hops: int, rng: random.Random, paraphrase: str = "templates"
    ) -> Iterator[WorldQuestion]:
        """A question for each path about the entity, worded at random."""
        for path in self.paths_about(entity_id, hops):
            yield self.question(path, rng, paraphrase)

    def questions(
        self, hops: int, rng: random.Random, paraphrase: str = "templates"
    ) -> Iterator[WorldQuestion]:
        """Those of every entity: about seeds and held-out answers alike."""
        for entity_id in self.graph.entities:
            yield from self.questions_about(entity_id, hops, rng, paraphrase)

    def question(
        self, path: Path, rng: random.Random, paraphrase: str = "templates"
    ) -> WorldQuestion:
        """The question that a path answers, worded at random."""
        start, end = self.graph.entities[path[0].head], self.graph.entities[path[-1].tail]
        relations = [triple.relation for triple in path]
        return WorldQuestion(
            text=grammar.phrase_question(start.name, relations, rng, paraphrase),
            answer=end.name,
            aliases=end.aliases,
            hops=len(path),
            path=path,
            evidence=tuple(triple.head for triple in path),
        )


def make_world(seed: int, entities: int = 880, *, held_out: float = 0.35, hops: int = 2) -> World:
    """The world of a seed.

    `held_out` is the share of answer entities that are kept for evaluation; `hops` the longest
    chain its seeds ask for (1 to 4). Raises DataError for arguments that make no world.
    """
    if entities < MIN_ENTITIES:
        raise DataError(f"entities={entities}: a world needs at least {MIN_ENTITIES}")
    if not 0 < held_out < 1:
        raise DataError(f"held_out={held_out}: expected a share within (0, 1)")
    if not 1 <= hops <= MAX_HOPS:
        raise DataError(f"hops={hops}: expected 1 to {MAX_HOPS}")
    ids = {kind: [f"{kind}-{i}" for i in range(count)] for kind, count in _counts(entities).items()}
    triples = _draw_triples(ids, seed)
    graph = KnowledgeGraph.of(_name_entities(ids, triples, seed), triples)
    answers, held_out_answers = _split(graph, seed, held_out, hops)
    return World(
        seed=seed, hops=hops, graph=graph, answers=answers, held_out_answers=held_out_answers
    )


def iter_passages(seed: int, entities: int = 1_000_000) -> Iterator[Document]:
    """The passages of `make_world(seed, entities)`, streamed."""
    return make_world(seed, entities).documents()


def evaluation_questions(
    world: World, hops: int, count: int, seed: int, paraphrase: str = "templates"
) -> tuple[WorldQuestion, ...]:
    """`count` different questions about held-out answers, spread evenly over the answers.

    Fewer where the world has no more. Which facts they ask for depends on the world and `seed`, not
    on the paraphrase set.
    """
    rng = _stream(seed, "evaluation", f"{world.seed}/{hops}")
    wanted = list(world.held_out_answers)
    rng.shuffle(wanted)
    pools: list[list[Path]] = []
    for answer in wanted:
        if len(pools) == count:
            break
        pool = list(world.paths_about(answer.uid, hops))
        rng.shuffle(pool)
        pools += [pool] if pool else []
    # Each round takes one path to every answer that still has one.
    paths = [path for taken in itertools.zip_longest(*pools) for path in taken if path]
    return tuple(world.question(path, rng, paraphrase) for path in paths[:count])


# Making a world -----------------------------------------------------------------------------------


def _stream(seed: int, purpose: str, key: str = "") -> random.Random:
    """A random stream of its own for everything that is drawn."""
    return random.Random(f"miniwiki/{seed}/{purpose}/{key}")


def _counts(entities: int) -> dict[str, int]:
    """Entities of each kind; the total is exact."""
    whole = sum(PROPORTIONS.values())
    countries = max(2, round(PROPORTIONS["country"] * math.sqrt(entities / whole)))
    rest = whole - PROPORTIONS["country"]
    counts = {
        kind: (entities - countries) * PROPORTIONS[kind] // rest
        for kind in ("city", "company", "film")
    }
    people = entities - countries - sum(counts.values())
    return {"person": people, **counts, "country": countries}


def _draw_triples(ids: dict[str, list[str]], seed: int) -> list[Triple]:
    """One tail for each head and relation, every tail about equally often; grouped by head."""
    tails = {
        name: _evenly(ids[relation.tail], len(ids[relation.head]), _stream(seed, "tails", name))
        for name, relation in grammar.RELATIONS.items()
    }
    # A capital lies in its own country.
    place = {city: i for i, city in enumerate(ids["city"])}
    for country, capital in zip(ids["country"], tails["capital"], strict=True):
        tails["country"][place[capital]] = country
    return [
        Triple(head=head, relation=relation, tail=tails[relation][i])
        for kind, heads in ids.items()
        for i, head in enumerate(heads)
        for relation in grammar.relations_of(kind)
    ]


def _evenly(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` values in random order, none of them more than once oftener than another."""
    whole, rest = divmod(count, len(values))
    drawn = [*values] * whole + rng.sample(values, rest)
    rng.shuffle(drawn)
    return drawn


def _name_entities(
    ids: dict[str, list[str]], triples: Iterable[Triple], seed: int
) -> Iterator[Entity]:
    """Aliases go to entities that some other passage mentions: elsewhere nobody would meet them."""
    mentioned = {triple.tail for triple in triples}
    rng = _stream(seed, "aliases")
    for kind, members in ids.items():
        candidates = [member for member in members if member in mentioned]
        aliased = rng.sample(candidates, min(len(candidates), round(ALIAS_SHARE * len(members))))
        names = draw_names(kind, len(members) + len(aliased), _stream(seed, "names", kind))
        aliases = dict(zip(aliased, names[len(members) :], strict=True))
        for member, name in zip(members, names, strict=False):
            alias = (aliases[member],) if member in aliases else ()
            yield Entity(id=member, name=name, aliases=alias, kind=kind)


def _split(
    graph: KnowledgeGraph, seed: int, held_out: float, hops: int
) -> tuple[tuple[Seed, ...], tuple[Seed, ...]]:
    """Entities that some question asks for, as seeds and held-out answers, in random order."""
    rng = _stream(seed, "split")
    answers = []
    for entity in graph.entities.values():
        depths = [h for h in range(1, hops + 1) if any(graph.paths_to(entity.id, h))]
        if depths:
            depth = rng.choice(depths)
            answers.append(
                Seed(uid=entity.id, answer=entity.name, aliases=entity.aliases, hops=depth)
            )
    rng.shuffle(answers)
    kept = round(len(answers) * held_out)
    return tuple(answers[kept:]), tuple(answers[:kept])


# Files --------------------------------------------------------------------------------------------


def write_world(
    world: World, folder: str | os.PathLike[str], *, count: int = 250, paraphrase: str = "templates"
) -> None:
    """Writes corpus, answers, graph and `count` evaluation questions for each number of hops.

    `corpus.jsonl.gz` (id, title, text), `answers.jsonl` (uid, answer, aliases, hops),
    `graph.json.gz`, and `questions/1hop.jsonl`, `2hop.jsonl`, ... (id, question, answers with the
    canonical one first, gold: document ids). A file appears whole or not at all; the same world
    gives the same bytes.
    """
    folder = pathlib.Path(folder)
    _write(
        folder / "corpus.jsonl.gz",
        (_line({"id": d.id, "title": d.title, "text": d.text}) for d in world.documents()),
    )
    _write(folder / "graph.json.gz", _graph_text(world.graph))
    for hops in range(1, world.hops + 1):
        questions = evaluation_questions(world, hops, count, world.seed, paraphrase)
        if len(questions) < count:
            log.warning("%d-hop: the world has %d of %d questions", hops, len(questions), count)
        rows = (_question_row(question, i) for i, question in enumerate(questions))
        _write(folder / "questions" / f"{hops}hop.jsonl", map(_line, rows))
    _write(folder / "answers.jsonl", (_line(_seed_row(seed)) for seed in world.answers))


def load_graph(folder: str | os.PathLike[str]) -> KnowledgeGraph:
    """The graph that `write_world` wrote. Raises DataError when it cannot be used."""
    path = pathlib.Path(folder) / "graph.json.gz"
    if not path.is_file():
        raise DataError(f"{path}: no such file; write_world makes it")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
    except (gzip.BadGzipFile, EOFError, zlib.error, json.JSONDecodeError) as error:
        raise DataError(f"{path}: broken ({error}); make the world anew") from None
    if data.get("grammar") != grammar.VERSION:
        raise DataError(
            f"{path}: questions of grammar {data.get('grammar')}, this program reads "
            f"{grammar.VERSION}; make the world anew"
        )
    return KnowledgeGraph.from_json(data)


def _graph_text(graph: KnowledgeGraph) -> Iterator[str]:
    """`{"grammar": version, **graph.to_json()}`, a row at a time: large graphs fit."""
    yield f'{{"grammar": {grammar.VERSION}, "entities": [\n'
    yield from _joined(map(entity_row, graph.entities.values()))
    yield '], "triples": [\n'
    yield from _joined(map(triple_row, graph.triples))
    yield "]}\n"


def _joined(rows: Iterable[Any]) -> Iterator[str]:
    for i, row in enumerate(rows):
        yield (",\n" if i else "") + json.dumps(row)


def _question_row(question: WorldQuestion, number: int) -> dict[str, Any]:
    return {
        "id": f"{question.hops}hop-{number}",
        "question": question.text,
        "answers": [question.answer, *question.aliases],
        "gold": list(question.evidence),
    }


def _seed_row(seed: Seed) -> dict[str, Any]:
    return {
        "uid": seed.uid,
        "answer": seed.answer,
        "aliases": list(seed.aliases),
        "hops": seed.hops,
    }


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _write(path: pathlib.Path, pieces: Iterable[str]) -> None:
    """Through a temporary name, so that a killed run leaves no half file under the real one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as raw:
        if path.suffix == ".gz":
            # Without a name and a time in its header the file depends on its contents only.
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
                _pour(pieces, packed)
        else:
            _pour(pieces, raw)
    temporary.replace(path)


def _pour(pieces: Iterable[str], binary: Any) -> None:
    with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as text:
        text.writelines(pieces)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes a mini-encyclopaedia.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entities", type=int, default=880)
    parser.add_argument("--held-out", type=float, default=0.35)
    parser.add_argument(
        "--hops", type=int, default=2, help="longest chain of the questions, 1 to 4"
    )
    parser.add_argument("--questions", type=int, default=250, help="for each number of hops")
    parser.add_argument("--paraphrase", choices=tuple(grammar.WORDINGS), default="templates")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    world = make_world(args.seed, args.entities, held_out=args.held_out, hops=args.hops)
    write_world(world, args.out, count=args.questions, paraphrase=args.paraphrase)
    log.info(
        "%s: %d passages, %d facts, %d answers, %d held out",
        args.out,
        len(world.graph.entities),
        len(world.graph.triples),
        len(world.answers),
        len(world.held_out_answers),
    )


if __name__ == "__main__":
    main()
