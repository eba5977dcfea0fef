"""Verification: can the question be answered from its proposer's own evidence, hidden among noise?

The paper (SSP, arXiv 2510.18821) lets the solver answer without tools; its code asks an external
model and counts a whole trajectory's materials as one noise document. Here `verify.noise_unit` says
whether noise is single passages or such blobs, and the reader is whatever `read` is. Three rules
keep the check honest: noise is never the question's own evidence, own evidence is never cut to fit,
and an error rejects.

Every reading has a name, `<question uid>/verify/<sample>`, and draws from the random stream of that
name alone, so it depends on neither the order nor the number of the other questions.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from sspjax.config import VerifyConfig
from sspjax.self_play.judge import Judge, judge_groups
from sspjax.types import (
    Document,
    Prompt,
    Proposal,
    Question,
    Read,
    Reason,
    Trajectory,
    noun,
    record,
)

Stream = Callable[[str], random.Random]
"""A fresh random stream by name; in a run the name follows seed, attempt and step."""

ReaderPrompt = Callable[[Question, Sequence[Document], str], Prompt]
"""Question, documents to read and group name to the reader's prompt, of any length."""


Unit = tuple[Document, ...]
"""Documents that are shuffled, shown and dropped together."""


@noun
class VerifyCounts:
    """What became of the noise and of the readings, over all questions."""

    noise_asked: int = 0
    """In units of `verify.noise_unit`, as all of these."""
    noise_missing: int = 0
    """What the batch could not provide."""
    noise_dropped: int = 0
    """What did not fit into the reader's prompt."""
    unjudged: int = 0
    """Readings that failed or got no verdict."""

    def __add__(self, other: VerifyCounts) -> VerifyCounts:
        return VerifyCounts(
            noise_asked=self.noise_asked + other.noise_asked,
            noise_missing=self.noise_missing + other.noise_missing,
            noise_dropped=self.noise_dropped + other.noise_dropped,
            unjudged=self.unjudged + other.unjudged,
        )


@record
class Verification:
    """The proposals in their order, the rejected ones with their reason, and what it took."""

    proposals: tuple[Proposal, ...]
    readings: tuple[Trajectory, ...] = ()
    counts: VerifyCounts = VerifyCounts()


@record
class Fitted:
    """A reader's prompt within its budget (None: the evidence alone is too long)."""

    prompt: Prompt | None
    dropped: int
    """Noise units left out."""


@record
class Plan:
    """What will be read for one question."""

    prompts: tuple[Prompt, ...]
    """`samples` readings of evidence and noise, then one of noise alone if it is asked for."""
    missing: int
    dropped: int


def verify(
    proposals: Sequence[Proposal],
    config: VerifyConfig,
    *,
    stream: Stream,
    reader_prompt: ReaderPrompt,
    read: Read,
    judge: Judge,
) -> Verification:
    """Reads the question of every accepted proposal: one call of `read`, one of `judge`.

    A question passes when every sample is right and, with `counterfactual`, the noise alone does
    not give the answer. A proposal that comes with a reason keeps it; what its proposer was shown
    still serves as noise.
    """
    if config.reader == "none":
        return Verification(proposals=tuple(proposals))
    questions = [p.question for p in proposals if p.question is not None and p.reason is None]
    pool = NOISE_POOLS[config.noise_unit](proposals)
    plans = {
        q.uid: plan_readings(q, pool, config, stream=stream, reader_prompt=reader_prompt)
        for q in questions
    }
    readable = [(q, plan) for q in questions if (plan := plans[q.uid]) is not None]
    prompts = [prompt for _, plan in readable for prompt in plan.prompts]
    readings = tuple(read(prompts)) if prompts else ()
    if len(readings) != len(prompts):
        raise ValueError(
            f"read: expected {len(prompts)} trajectories, got {len(readings)}; "
            "a reader answers every prompt, in order"
        )
    queue = iter(readings)
    groups = judge_groups(
        [q for q, _ in readable],
        [[next(queue) for _ in plan.prompts] for _, plan in readable],
        judge,
    )
    reasons: dict[str, Reason | None] = dict.fromkeys(plans, Reason.VERIFY_TOO_LONG)
    reasons |= {g.question.uid: verdict(g.correct, config.samples) for g in groups}
    return Verification(
        proposals=tuple(
            dataclasses.replace(p, reason=reasons[p.question.uid])
            if p.question is not None and p.reason is None
            else p
            for p in proposals
        ),
        readings=readings,
        counts=VerifyCounts(
            noise_asked=config.noise * config.samples * len(readable),
            noise_missing=sum(plan.missing for _, plan in readable),
            noise_dropped=sum(plan.dropped for _, plan in readable),
            unjudged=sum(c is None for g in groups for c in g.correct),
        ),
    )


def verdict(correct: Sequence[bool | None], samples: int) -> Reason | None:
    """Why a question fails, from its judged readings: `samples`, then the counterfactual if any.

    One wrong sample, or the answer from noise alone, decides whatever else happened; short of that
    a reading that was not judged is an error, and an error rejects.
    """
    with_evidence, alone = correct[:samples], correct[samples:]
    if any(c is False for c in with_evidence):
        return Reason.VERIFY_WRONG
    if any(c is True for c in alone):
        return Reason.COUNTERFACTUAL
    return Reason.VERIFY_ERROR if any(c is None for c in correct) else None


def plan_readings(
    question: Question,
    pool: Sequence[Unit],
    config: VerifyConfig,
    *,
    stream: Stream,
    reader_prompt: ReaderPrompt,
) -> Plan | None:
    """The prompts that verify one question; None when its evidence does not fit into one.

    The counterfactual reads the noise of the first sample without the evidence; where there is no
    noise it reads nothing at all, which is the closed book.
    """

    def reading(
        name: str, evidence: Sequence[Unit], noise: Sequence[Unit], rng: random.Random
    ) -> Fitted:
        def prompt(documents: Sequence[Document]) -> Prompt:
            return reader_prompt(question, documents, name)

        return fit(evidence, noise, rng, prompt, config.prompt_tokens)

    own = (question.evidence,) if config.noise_unit == "blob" else single(question.evidence)
    noises, fitted = [], []
    for sample in range(config.samples):
        name = f"{question.uid}/verify/{sample}"
        rng = stream(name)
        noises.append(draw_noise(question.evidence, pool, config.noise, rng))
        fitted.append(reading(name, own, noises[-1], rng))
    if config.counterfactual:
        name = f"{question.uid}/verify/counterfactual"
        fitted.append(reading(name, (), noises[0], stream(name)))
    prompts = tuple(f.prompt for f in fitted if f.prompt is not None)
    if len(prompts) < len(fitted):
        return None
    return Plan(
        prompts=prompts,
        missing=sum(config.noise - len(noise) for noise in noises),
        dropped=sum(f.dropped for f in fitted),
    )


def single(documents: Sequence[Document]) -> tuple[Unit, ...]:
    """Every document as a unit of its own."""
    return tuple((d,) for d in documents)


def noise_pool(proposals: Sequence[Proposal]) -> tuple[Unit, ...]:
    """Every passage the batch's proposers were shown, valid or not, each id and each text once.

    Sorted, so that a draw from it does not depend on the order of the proposals.
    """
    shown = sorted(
        {d for p in proposals for d in p.trajectory.documents},
        key=lambda d: (d.id, d.title, d.text),
    )
    by_id = {d.id: d for d in reversed(shown)}
    by_text = {d.text: d for d in by_id.values()}
    return single(sorted(by_text.values(), key=lambda d: d.id))


def blob_pool(proposals: Sequence[Proposal]) -> tuple[Unit, ...]:
    """All that each proposer was shown, valid or not, as one unit; equal ones once, sorted."""
    blobs = {p.trajectory.documents for p in proposals} - {()}
    return tuple(sorted(blobs, key=lambda blob: [(d.id, d.title, d.text) for d in blob]))


NOISE_POOLS: dict[str, Callable[[Sequence[Proposal]], tuple[Unit, ...]]] = {
    "passage": noise_pool,
    "blob": blob_pool,
}
"""By `verify.noise_unit`."""


def draw_noise(
    evidence: Sequence[Document], pool: Sequence[Unit], count: int, rng: random.Random
) -> tuple[Unit, ...]:
    """Up to `count` units without any evidence, by id or by text; fewer if need be.

    What a blob shares with the evidence, or with a blob drawn before, is taken out of it.
    """
    ids, texts = {d.id for d in evidence}, {d.text for d in evidence}

    def unknown(unit: Unit) -> Unit:
        return tuple(d for d in unit if d.id not in ids and d.text not in texts)

    others = [unit for unit in pool if unknown(unit)]
    drawn: list[Unit] = []
    for unit in rng.sample(others, min(count, len(others))):
        if rest := unknown(unit):
            drawn.append(rest)
            ids |= {d.id for d in rest}
            texts |= {d.text for d in rest}
    return tuple(drawn)


def fit(
    evidence: Sequence[Unit],
    noise: Sequence[Unit],
    rng: random.Random,
    prompt: Callable[[Sequence[Document]], Prompt],
    budget: int,
) -> Fitted:
    """Units of evidence and noise shuffled into a prompt of at most `budget` tokens.

    Noise is dropped one unit at a time, the last drawn first, and the others keep their order;
    evidence is never cut. A unit's documents stay together.
    """
    units = [*evidence, *noise]
    rng.shuffle(units)
    spare = list(noise)
    while len((fitting := prompt(tuple(d for u in units for d in u))).token_ids) > budget:
        if not spare:
            return Fitted(prompt=None, dropped=len(noise))
        units.remove(spare.pop())
    return Fitted(prompt=fitting, dropped=len(noise) - len(spare))
