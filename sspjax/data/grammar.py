"""The language of the mini-encyclopaedia: what passages say, how questions ask, how both are read.

Every word stands between single spaces, punctuation too, so a word is the same tokens everywhere.
`{}` is where a name goes; in a question it may also be a noun phrase that stands for the name, and
so on inside that phrase ("who founded the employer of X ?").
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence

from sspjax.types import noun

VERSION = 1
"""Changes whenever a question of an older world might be read differently, or not at all."""


@noun
class Kind:
    """How a passage speaks of entities of one kind."""

    pronouns: tuple[str, ...]
    apposition: str
    """How an alias is introduced right after the name."""
    descriptions: tuple[str, ...] = ()
    """One more predicate, for kinds with few facts."""


@noun
class Relation:
    """A functional relation: every entity of kind `head` has exactly one tail."""

    head: str
    tail: str
    facts: tuple[str, ...]
    """Predicates that state it in the passage of its head."""


@noun
class Wording:
    """How one relation is asked for (`questions`) and how its tail is paraphrased (`phrases`)."""

    questions: tuple[str, ...]
    phrases: tuple[str, ...]


ALIAS_FACT = "is also called {}"

KINDS: dict[str, Kind] = {
    "person": Kind(pronouns=("he", "she"), apposition="known as {}"),
    "city": Kind(
        pronouns=("it",),
        apposition="once called {}",
        descriptions=("is a city", "is an old city"),
    ),
    "company": Kind(
        pronouns=("it",),
        apposition="known as {}",
        descriptions=("is a company", "is a small company"),
    ),
    "film": Kind(pronouns=("it",), apposition="also shown as {}"),
    "country": Kind(
        pronouns=("it",),
        apposition="once called {}",
        descriptions=("is a country", "is a small country"),
    ),
}

RELATIONS: dict[str, Relation] = {
    "born": Relation(head="person", tail="city", facts=("was born in {}", "is a native of {}")),
    "works": Relation(head="person", tail="company", facts=("works for {}", "is employed by {}")),
    "debut": Relation(
        head="person", tail="film", facts=("first acted in {}", "made a debut in {}")
    ),
    "founder": Relation(
        head="company", tail="person", facts=("was founded by {}", "was started by {}")
    ),
    "hq": Relation(head="company", tail="city", facts=("is based in {}", "has its office in {}")),
    "director": Relation(
        head="film", tail="person", facts=("was directed by {}", "has {} as its director")
    ),
    "studio": Relation(head="film", tail="company", facts=("was produced by {}", "was made by {}")),
    "setin": Relation(head="film", tail="city", facts=("is set in {}", "takes place in {}")),
    "mayor": Relation(
        head="city", tail="person", facts=("is led by mayor {}", "has {} as its mayor")
    ),
    "country": Relation(head="city", tail="country", facts=("lies in {}", "belongs to {}")),
    "capital": Relation(
        head="country", tail="city", facts=("has its capital in {}", "has {} as its capital")
    ),
    "leader": Relation(
        head="country", tail="person", facts=("is ruled by {}", "has {} as its president")
    ),
}

WORDINGS: dict[str, dict[str, Wording]] = {
    "templates": {
        "born": Wording(
            questions=("where was {} born ?", "what is the birthplace of {} ?"),
            phrases=("the birthplace of {}", "the city where {} was born"),
        ),
        "works": Wording(
            questions=("what company employs {} ?", "who is the employer of {} ?"),
            phrases=("the employer of {}", "the company that employs {}"),
        ),
        "debut": Wording(
            questions=("what was the debut of {} ?", "in what film did {} first act ?"),
            phrases=("the debut of {}", "the film in which {} first acted"),
        ),
        "founder": Wording(
            questions=("who founded {} ?", "who is the founder of {} ?"),
            phrases=("the founder of {}", "the person who founded {}"),
        ),
        "hq": Wording(
            questions=("where is {} based ?", "what is the home city of {} ?"),
            phrases=("the home city of {}", "the city where {} is based"),
        ),
        "director": Wording(
            questions=("who directed {} ?", "who is the director of {} ?"),
            phrases=("the director of {}", "the person who directed {}"),
        ),
        "studio": Wording(
            questions=("what company produced {} ?", "what is the studio of {} ?"),
            phrases=("the studio of {}", "the company that produced {}"),
        ),
        "setin": Wording(
            questions=("where is {} set ?", "in what city does {} take place ?"),
            phrases=("the setting of {}", "the city where {} is set"),
        ),
        "mayor": Wording(
            questions=("who is the mayor of {} ?", "what mayor leads {} ?"),
            phrases=("the mayor of {}", "the mayor who leads {}"),
        ),
        "country": Wording(
            questions=("in what country is {} ?", "what country does {} belong to ?"),
            phrases=("the country of {}", "the country in which {} lies"),
        ),
        "capital": Wording(
            questions=("what is the capital of {} ?", "what city is the capital of {} ?"),
            phrases=("the capital of {}", "the capital city of {}"),
        ),
        "leader": Wording(
            questions=("who is the president of {} ?", "who rules {} ?"),
            phrases=("the president of {}", "the person who rules {}"),
        ),
    },
    "free": {
        "born": Wording(
            questions=(
                "in which town did the life of {} begin ?",
                "{} is a native of what place ?",
                "which place saw the birth of {} ?",
                "tell me where {} came into the world .",
            ),
            phrases=(
                "the home town of {}",
                "the place where the life of {} began",
                "the town {} came from",
            ),
        ),
        "works": Wording(
            questions=(
                "for which firm does {} work ?",
                "who pays the wages of {} ?",
                "{} is on the staff of which business ?",
                "name the firm that {} works for .",
            ),
            phrases=(
                "the firm {} works for",
                "the business that pays {}",
                "the workplace of {}",
            ),
        ),
        "debut": Wording(
            questions=(
                "which movie was the screen debut of {} ?",
                "{} made a debut in which movie ?",
                "which picture started the career of {} ?",
                "name the movie in which {} was seen first .",
            ),
            phrases=(
                "the debut movie of {}",
                "the movie that started the career of {}",
                "the picture {} was seen in first",
            ),
        ),
        "founder": Wording(
            questions=(
                "who set up {} ?",
                "whose idea was {} in the beginning ?",
                "{} was created by whom ?",
                "name the one who started {} .",
            ),
            phrases=(
                "the one who set up {}",
                "the creator of {}",
                "the entrepreneur behind {}",
            ),
        ),
        "hq": Wording(
            questions=(
                "which town hosts the headquarters of {} ?",
                "from where is {} run ?",
                "{} keeps its headquarters in which town ?",
                "name the place that {} is run from .",
            ),
            phrases=(
                "the town that hosts {}",
                "the place {} is run from",
                "the headquarters town of {}",
            ),
        ),
        "director": Wording(
            questions=(
                "who was behind the camera of {} ?",
                "whose work is {} as a director ?",
                "{} was shot by which film maker ?",
                "name the one who shot {} .",
            ),
            phrases=(
                "the film maker behind {}",
                "the one who shot {}",
                "the person in charge of the camera of {}",
            ),
        ),
        "studio": Wording(
            questions=(
                "which firm brought {} to the screen ?",
                "who paid for the making of {} ?",
                "{} came out of which studio ?",
                "name the firm that released {} .",
            ),
            phrases=(
                "the firm that released {}",
                "the business that brought {} to the screen",
                "the maker of {}",
            ),
        ),
        "setin": Wording(
            questions=(
                "which town is the scene of {} ?",
                "the story of {} happens in which town ?",
                "where does the plot of {} unfold ?",
                "name the town that {} plays in .",
            ),
            phrases=(
                "the scene of {}",
                "the town where the story of {} happens",
                "the place {} plays in",
            ),
        ),
        "mayor": Wording(
            questions=(
                "who runs the town hall of {} ?",
                "{} has elected whom as mayor ?",
                "who is the head of the city of {} ?",
                "name the one in office as mayor of {} .",
            ),
            phrases=(
                "the one who runs the town hall of {}",
                "the head of the city of {}",
                "the politician in charge of {}",
            ),
        ),
        "country": Wording(
            questions=(
                "which nation is {} part of ?",
                "{} is found in which nation ?",
                "on the map of which country do you find {} ?",
                "name the nation that {} is part of .",
            ),
            phrases=(
                "the nation {} is part of",
                "the nation that has {} on its map",
                "the homeland of {}",
            ),
        ),
        "capital": Wording(
            questions=(
                "in which town does the government of {} sit ?",
                "{} is governed from which town ?",
                "which town is the first city of {} ?",
                "name the seat of government of {} .",
            ),
            phrases=(
                "the seat of government of {}",
                "the town {} is governed from",
                "the first city of {}",
            ),
        ),
        "leader": Wording(
            questions=(
                "who is the head of state of {} ?",
                "{} is governed by whom ?",
                "who holds the highest office of {} ?",
                "name the one who governs {} .",
            ),
            phrases=(
                "the head of state of {}",
                "the one who governs {}",
                "the holder of the highest office of {}",
            ),
        ),
    },
}
"""Paraphrase set to relation to wording. The sets share no template."""


def relations_of(kind: str) -> tuple[str, ...]:
    """Relations that entities of `kind` are the head of."""
    return tuple(name for name, relation in RELATIONS.items() if relation.head == kind)


def wordings(paraphrase: str) -> dict[str, Wording]:
    """The wordings of one paraphrase set. Raises ValueError for an unknown one."""
    if paraphrase not in WORDINGS:
        raise ValueError(f"paraphrase={paraphrase!r}: expected one of {', '.join(WORDINGS)}")
    return WORDINGS[paraphrase]


def phrase_question(
    name: str, relations: Sequence[str], rng: random.Random, paraphrase: str = "templates"
) -> str:
    """A random wording of the question for the end of the chain of relations that starts at `name`.

    The first relation is applied first: ("works", "founder") asks who founded the employer of name.
    """
    chosen = wordings(paraphrase)
    *inner, last = relations
    subject = name
    for relation in inner:
        subject = rng.choice(chosen[relation].phrases).replace("{}", subject)
    return rng.choice(chosen[last].questions).replace("{}", subject)


def phrasings(name: str, relations: Sequence[str], paraphrase: str = "templates") -> Iterator[str]:
    """Every wording of the question that `phrase_question` picks one of."""
    chosen = wordings(paraphrase)
    *inner, last = relations
    slots = [chosen[relation].phrases for relation in inner] + [chosen[last].questions]
    for templates in itertools.product(*slots):
        text = name
        for template in templates:
            text = template.replace("{}", text)
        yield text


def write_passage(
    kind: str,
    name: str,
    alias: str | None,
    facts: Sequence[tuple[str, str]],
    rng: random.Random,
) -> str:
    """The passage of an entity: starts with its name, states every (relation, mention) of `facts`.

    Order, wording and sentence breaks vary; most passages repeat the name in later sentences, the
    others use a pronoun. Between 18 and 34 words, punctuation counted.
    """
    style = KINDS[kind]
    predicates = [
        rng.choice(RELATIONS[relation].facts).replace("{}", mention) for relation, mention in facts
    ]
    subject = name
    if alias and rng.random() < 0.5:
        subject = f"{name} , {style.apposition.replace('{}', alias)} ,"
    elif alias:
        predicates.append(ALIAS_FACT.replace("{}", alias))
    rng.shuffle(predicates)
    if style.descriptions:
        predicates.insert(0, rng.choice(style.descriptions))
    later = name if rng.random() < 0.75 else rng.choice(style.pronouns)
    sentences = []
    while predicates:
        taken = min(len(predicates), rng.choice((1, 1, 2)))
        sentences.append(f"{subject} {' and '.join(predicates[:taken])} .")
        subject, predicates = later, predicates[taken:]
    return " ".join(sentences)


def readable(text: str) -> str:
    """Text as it is compared: lower case, words and punctuation apart, no final mark."""
    pieces = re.findall(r"\w+|[^\w\s]", text.lower())
    while pieces and pieces[-1] in "?.!":
        pieces.pop()
    return " ".join(pieces)
