"""Small trajectories written as what happened in them."""

import numpy as np

from sspjax.types import (
    Act,
    Document,
    Group,
    Prompt,
    Proposal,
    Question,
    Role,
    Seed,
    Stop,
    Trajectory,
    Turn,
)


def document(name, text=None):
    return Document(id=name, title=f"Title {name}", text=text or f"Text of {name}.")


def prompt(subject, role=Role.PROPOSER, group="group", tokens=3):
    return Prompt(
        role=role,
        subject=subject,
        group=group,
        messages=(),
        token_ids=np.zeros(tokens, np.int32),
    )


def turn(act=Act.NONE, argument="", sampled=True, documents=(), tokens=2):
    return Turn(
        token_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        sampled=sampled,
        text=argument,
        act=act,
        argument=argument,
        documents=tuple(documents),
    )


def searches(*results):
    """Each of (query, documents) as the search and the tool's reply."""
    return [
        t
        for query, documents in results
        for t in (turn(Act.SEARCH, query), turn(sampled=False, documents=documents, tokens=5))
    ]


def trajectory(turns, subject, uid="t0", stop=Stop.NO_ACTION, role=Role.PROPOSER):
    return Trajectory(
        uid=uid, prompt=prompt(subject, role), turns=tuple(turns), stop=stop, policy_step=0
    )


def proposed(text, uid="t0", results=(("a query", ()),), answer="Oslo", aliases=(), stop=None):
    """A proposer that ran the searches and asked `text` (None: asked nothing)."""
    asked = [] if text is None else [turn(Act.QUESTION, text)]
    stop = stop or (Stop.QUESTION if asked else Stop.NO_ACTION)
    seed = Seed(uid=f"seed-{uid}", answer=answer, aliases=aliases)
    return trajectory([*searches(*results), *asked], seed, uid, stop)


def question(uid="q", text="Which city is it?", answer="Oslo", aliases=(), evidence=()):
    return Question(uid=uid, text=text, answer=answer, aliases=aliases, evidence=tuple(evidence))


def proposal(uid, documents=(), reason=None, text=None, answer="Oslo", asked=True):
    """A proposal whose proposer was shown `documents`; accepted unless there is a reason."""
    text = text or f"Which question is {uid}?"
    played = proposed(text if asked else None, uid, (("a query", documents),), answer)
    found = question(uid, text, answer, evidence=documents) if asked else None
    return Proposal(trajectory=played, question=found, reason=reason)


def solved(subject, answer, uid="s0", stop=None, role=Role.SOLVER, searched=0):
    """A rollout that answers `answer` (None: gives none) after some searches."""
    said = [] if answer is None else [turn(Act.ANSWER, answer)]
    turns = [*searches(*[(f"query {i}", ()) for i in range(searched)]), *said]
    return trajectory(turns, subject, uid, stop or (Stop.ANSWER if said else Stop.NO_ACTION), role)


def group(subject, answers, correct):
    """A judged group; the rollouts answer `answers`."""
    rollouts = tuple(solved(subject, a, f"{subject.uid}/{i}") for i, a in enumerate(answers))
    return Group(question=subject, rollouts=rollouts, correct=tuple(correct))
