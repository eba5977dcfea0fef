"""Scripted trajectories of mini-encyclopaedias: what the warm start learns from.

A script plays each role with the graph at hand: it knows the path to the answer, but what it reads
comes from the world's real retriever, and its turns are composed by the same code as a rollout's.
Scripts are partly lazy, so that the agent starts with all the habits self-play will sort out.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sspjax.config import RunConfig, WarmStartConfig
from sspjax.data.miniwiki import World, WorldQuestion
from sspjax.errors import UserError
from sspjax.rollout.prompts import (
    PromptSet,
    act_text,
    observation_turn,
    proposer_prompt,
    reader_prompt,
    solver_prompt,
)
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.types import (
    Act,
    Document,
    Prompt,
    Question,
    Seed,
    Stop,
    Trajectory,
    Triple,
    Turn,
)

PATIENCE = 1000
"""Scripts that may fail one after the other before the settings are to blame."""

Search = Callable[[Sequence[str]], Sequence[tuple[Document, ...]]]
"""Queries to the passages that the world's retriever finds."""


@dataclasses.dataclass(frozen=True)
class Script:
    """Demonstrations of one world. Every method draws from `rng` alone, and gives None where the
    retriever did not find what the script needs.
    """

    world: World
    search: Search
    tokenizer: Tokenizer
    prompt_set: PromptSet
    config: RunConfig

    def proposer(self, rng: random.Random) -> Trajectory | None:
        """From an answer back to a passage that mentions it, once or twice, then the question."""
        seed = self._answer(rng)
        played = self._work_back(seed, rng)
        if played is None:
            return None
        question, searches = played
        prompt = proposer_prompt(
            self.prompt_set,
            self.tokenizer,
            seed,
            "demonstration",
            self.config.proposer.prompt_tokens,
        )
        return self._trajectory(prompt, searches, Act.QUESTION, question.text)

    def reader(self, rng: random.Random, *, short: bool = False) -> Trajectory | None:
        """Answers from given passages. `short`: one fact and at most one other passage, else a
        proposer's evidence among noise.

        Half of the time the question is not the proposer's, but another one that these passages
        answer. What a proposer was shown mentions its answer more often than anything else, and a
        reader that learnt to say the name it sees most would pass every false question.
        """
        if short:
            question = self._one_hop(rng)
            shown = [self.world.document(question.evidence[0])]
            shown += self._noise(rng, rng.randrange(2), shown)
        else:
            played = self._work_back(self._answer(rng), rng)
            if played is None:
                return None
            question, searches = played
            shown = list({d.id: d for _, documents in searches for d in documents}.values())
            shown += self._noise(rng, self.config.verify.noise, shown)
            if rng.random() < 0.5:
                question = self._answered_by(shown, rng)
        rng.shuffle(shown)
        prompt = reader_prompt(
            self.prompt_set,
            self.tokenizer,
            _asked(question),
            shown,
            "demonstration",
            self.config.verify.prompt_tokens,
        )
        if prompt is None:
            return None
        return self._trajectory(prompt, (), Act.ANSWER, self.world.mention(question.path[-1]))

    def solver(
        self, rng: random.Random, hops: int, *, lazy: WarmStartConfig | None = None
    ) -> Trajectory | None:
        """Searches the name in the question, then what the passage says, and answers.

        `lazy`: how often it does less than that (None: never).
        """
        if hops == 1:
            question = self._one_hop(rng)
            if lazy and rng.random() < lazy.lazy_one_hop:
                return self._one_word_search(question, rng)
        else:
            question = self._question(rng, hops)
            if question is None:
                return None
            if lazy and rng.random() < lazy.lazy_two_hop:
                # Stops at the first entity it reads about.
                return self._follow(question, question.path[:1])
        return self._follow(question, question.path)

    def _follow(self, question: WorldQuestion, path: Sequence[Triple]) -> Trajectory | None:
        """One search for each fact of the path; the answer is what the last fact mentions."""
        query, searches = self.world.graph.entities[path[0].head].name, []
        for triple in path:
            documents = self.search([query])[0]
            if triple.head not in {d.id for d in documents}:
                return None
            searches.append((query, documents))
            query = self.world.mention(triple)
        return self._solve(question, searches, query)

    def _one_word_search(self, question: WorldQuestion, rng: random.Random) -> Trajectory | None:
        """Searches one word of the name and believes what the first fitting passage says."""
        start = self.world.graph.entities[question.path[0].head]
        query = rng.choice(start.name.split())
        documents = self.search([query])[0]
        relation = question.path[0].relation
        for document in documents:
            for triple in self.world.graph.outgoing.get(document.id, ()):
                if triple.relation == relation:
                    searches = [(query, documents)]
                    return self._solve(question, searches, self.world.mention(triple))
        return None

    def _solve(
        self, question: WorldQuestion, searches: Sequence[tuple[str, Sequence[Document]]], said: str
    ) -> Trajectory:
        limit = self.config.solver.prompt_tokens
        prompt = solver_prompt(
            self.prompt_set, self.tokenizer, _asked(question), "demonstration", limit
        )
        return self._trajectory(prompt, searches, Act.ANSWER, said)

    def _work_back(
        self, seed: Seed, rng: random.Random
    ) -> tuple[WorldQuestion, list[tuple[str, tuple[Document, ...]]]] | None:
        """Searches the answer, then an entity whose passage mentions it, `hops` times in all."""
        path: list[Triple] = []
        searches: list[tuple[str, tuple[Document, ...]]] = []
        target, query = seed.uid, seed.answer or ""
        for _ in range(seed.hops):
            documents = self.search([query])[0]
            searches.append((query, documents))
            found = {d.id for d in documents}
            met = {target, *(t.tail for t in path)}
            facts = [
                t
                for t in self.world.graph.incoming.get(target, ())
                if t.head in found and t.head not in met
            ]
            if not facts:
                return None
            path.insert(0, rng.choice(facts))
            target = path[0].head
            query = self.world.graph.entities[target].name
        return self.world.question(tuple(path), rng), searches

    def _answer(self, rng: random.Random) -> Seed:
        return rng.choice(self.world.answers + self.world.held_out_answers)

    def _one_hop(self, rng: random.Random) -> WorldQuestion:
        return self.world.question((rng.choice(self.world.graph.triples),), rng)

    def _question(self, rng: random.Random, hops: int) -> WorldQuestion | None:
        """A walk of `hops` facts from a random entity; None where it ends early or turns back."""
        path = [rng.choice(self.world.graph.triples)]
        for _ in range(hops - 1):
            onward = self.world.graph.outgoing.get(path[-1].tail, ())
            if not onward:
                return None
            path.append(rng.choice(onward))
        if len({path[0].head, *(t.tail for t in path)}) <= hops:
            return None
        return self.world.question(tuple(path), rng)

    def _answered_by(self, shown: Sequence[Document], rng: random.Random) -> WorldQuestion:
        """A question about one or two facts that the passages state, two where two are linked."""
        outgoing = self.world.graph.outgoing
        facts = [t for d in shown for t in outgoing.get(d.id, ())]
        heads = {t.head for t in facts}
        chains = [
            (t, onward)
            for t in facts
            if t.tail in heads
            for onward in outgoing[t.tail]
            if onward.tail != t.head
        ]
        if chains and self.world.hops > 1 and rng.random() < 0.5:
            return self.world.question(rng.choice(chains), rng)
        return self.world.question((rng.choice(facts),), rng)

    def _noise(self, rng: random.Random, count: int, shown: Sequence[Document]) -> list[Document]:
        """Passages of other entities, as other proposals of a batch would have shown."""
        own = {d.id for d in shown}
        ids = [i for i in rng.sample(self._ids(), count + len(own)) if i not in own]
        return [self.world.document(i) for i in ids[:count]]

    def _ids(self) -> list[str]:
        return list(self.world.graph.entities)

    def _trajectory(
        self,
        prompt: Prompt,
        searches: Sequence[tuple[str, Sequence[Document]]],
        act: Act,
        argument: str,
    ) -> Trajectory:
        turns: list[Turn] = []
        for query, documents in searches:
            turns.append(self._said(Act.SEARCH, query))
            turns.append(
                observation_turn(
                    self.prompt_set,
                    self.tokenizer,
                    documents,
                    budget=self.config.solver.observation_tokens,
                    document_tokens=self.config.retrieval.document_tokens,
                )
            )
        turns.append(self._said(act, argument))
        stop = Stop.QUESTION if act is Act.QUESTION else Stop.ANSWER
        return Trajectory(
            uid="demonstration", prompt=prompt, turns=tuple(turns), stop=stop, policy_step=0
        )

    def _said(self, act: Act, argument: str) -> Turn:
        """A turn of the agent, forced: it has no behaviour policy, it is learnt by likelihood."""
        text = act_text(self.prompt_set, act, argument)
        ids = np.asarray(self.tokenizer.encode(text), np.int32)
        return Turn(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            sampled=False,
            text=text,
            act=act,
            argument=argument,
        )


Lesson = Callable[[Script, WarmStartConfig, random.Random], Trajectory | None]
"""Draws one demonstration; None where the script found nothing to show."""


def demonstrations(
    scripts: Sequence[Script], config: WarmStartConfig, step: int, seed: int
) -> list[Trajectory]:
    """The batch of one warm-start step; depends on (seed, step) only.

    Three lessons in a row: short tasks until copying is learnt, then every role done well, then the
    lazy habits that self-play has to sort out. Laziness too early keeps reading from being learnt.
    """
    rng = random.Random(f"{seed}/demonstrations/{step}")
    lesson: Lesson
    if step <= config.copy_steps:
        lesson = _first_lesson
    elif step <= config.steps - config.lazy_steps:
        lesson = _all_roles
    else:
        lesson = functools.partial(_all_roles, lazily=True)
    stream = _stream(scripts, config, lesson, rng)
    return [next(stream) for _ in range(config.batch)]


def proposer_demonstrations(
    scripts: Sequence[Script], config: WarmStartConfig, count: int, seed: int
) -> list[Trajectory]:
    """`count` proposer demonstrations that no warm-start step has shown; depends on `seed` only."""
    rng = random.Random(f"{seed}/proposer demonstrations")
    proposers = dataclasses.replace(config, proposer_share=1.0, reader_share=0.0)
    stream = _stream(scripts, proposers, _all_roles, rng)
    return [next(stream) for _ in range(count)]


def turn_weight(config: WarmStartConfig) -> Callable[[Turn], float]:
    """Loss weight of a turn's tokens: 1 where the agent speaks, less where a tool does."""
    return lambda turn: config.observation_weight if turn.act is Act.NONE else 1.0


def _stream(
    scripts: Sequence[Script], config: WarmStartConfig, lesson: Lesson, rng: random.Random
) -> Iterator[Trajectory]:
    missed = 0
    while missed < PATIENCE:
        made = lesson(rng.choice(scripts), config, rng)
        missed = missed + 1 if made is None else 0
        if made is not None:
            yield made
    raise UserError(
        f"warm start: {PATIENCE} scripts in a row found nothing to show; raise "
        "config.verify.prompt_tokens or retrieval.topk, or lower warm_start.reader_share"
    )


def _first_lesson(script: Script, config: WarmStartConfig, rng: random.Random) -> Trajectory | None:
    """One search, one answer. The query is a copy of the name in the question and copying is learnt
    there first; the answer is one of few names to choose from.
    """
    if rng.random() < 0.15:
        return script.reader(rng, short=True)
    return script.solver(rng, 1)


def _all_roles(
    script: Script, config: WarmStartConfig, rng: random.Random, *, lazily: bool = False
) -> Trajectory | None:
    draw = rng.random()
    if draw < config.proposer_share:
        return script.proposer(rng)
    if draw < config.proposer_share + config.reader_share:
        return script.reader(rng)
    hops = rng.randint(1, min(2, script.world.hops))
    return script.solver(rng, hops, lazy=config if lazily else None)


def _asked(question: WorldQuestion) -> Question:
    return Question(
        uid=question.text, text=question.text, answer=question.answer, aliases=question.aliases
    )
