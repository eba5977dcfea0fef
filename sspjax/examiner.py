"""The examiner: questions to numbers, with the roles, tools and programs of training.

`agent` searches over several turns, `rag` reads what one search of the question finds,
`closed_book` answers from memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sspjax.config import ConfigError, EvalConfig, RunConfig
from sspjax.data.answers import read_questions
from sspjax.metrics import Progress
from sspjax.players import Players
from sspjax.retrieval.client import RetrievalError, Retriever
from sspjax.rollout.conversation import Watch
from sspjax.rollout.prompts import PROMPTS, PromptTooLong, reader_prompt, solver_prompt
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.self_play.exact import exact_match, f1
from sspjax.self_play.judge import Judge, judge_groups
from sspjax.types import Act, Document, Group, Prompt, Question, Role, Turn

GENERAL = ("nq", "triviaqa", "popqa")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "2hop", "3hop", "4hop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examiner:
    """Poses questions in one of the three modes."""

    config: RunConfig
    players: Players
    tokenizer: Tokenizer
    retriever: Retriever
    judge: Judge

    def answer(
        self,
        questions: Sequence[Question],
        how: EvalConfig,
        *,
        randomness: Sequence[object],
        watch: Watch | None = None,
    ) -> tuple[Group, ...]:
        """One judged group of `how.samples` rollouts for each question, in one stream of slots.

        Raises PromptTooLong for a question that does not fit, before anything is played, and
        RetrievalError where `rag` cannot look a question up.
        """
        n = how.samples
        prompts = [p for p in self._prompts(questions, how.mode) for _ in range(n)]
        role = Role.READER if how.mode == "rag" else Role.SOLVER
        rules = self.players.rules(role, tools=how.mode == "agent", temperature=how.temperature)
        if how.mode == "closed_book":
            rules = dataclasses.replace(rules, max_turns=1)
        rollouts = self.players.play(role, prompts, rules=rules, randomness=randomness, watch=watch)
        groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
        return judge_groups(questions, groups, self.judge)

    def _prompts(self, questions: Sequence[Question], mode: str) -> list[Prompt]:
        prompt_set = PROMPTS[self.config.model.prompts]
        if mode != "rag":
            limit = self.config.solver.prompt_tokens
            return [solver_prompt(prompt_set, self.tokenizer, q, q.uid, limit) for q in questions]
        found = self.retriever.search([q.text for q in questions], self.config.retrieval.topk)
        lost = sum(documents is None for documents in found)
        if lost:
            raise RetrievalError(
                f"mode rag: expected passages for {len(questions)} questions, the retriever failed "
                f"for {lost}; see that it is up and evaluate again"
            )
        return [
            self._reading(question, documents or ())
            for question, documents in zip(questions, found, strict=True)
        ]

    def _reading(self, question: Question, documents: Sequence[Document]) -> Prompt:
        """The longest prefix of the found passages that fits the reader's prompt."""
        prompt_set, limit = PROMPTS[self.config.model.prompts], self.config.verify.prompt_tokens
        for count in range(len(documents), 0, -1):
            prompt = reader_prompt(
                prompt_set, self.tokenizer, question, documents[:count], question.uid, limit
            )
            if prompt is not None:
                return prompt
        prompt = reader_prompt(prompt_set, self.tokenizer, question, (), question.uid, limit)
        if prompt is None:
            raise PromptTooLong(
                f"question {question.uid}: longer than config.verify.prompt_tokens={limit}, even "
                "without passages; raise it"
            )
        return prompt


def benchmarks(config: RunConfig, world: Path) -> dict[str, tuple[Question, ...]]:
    """Benchmark name (its file's, without endings) to its first `eval.questions` questions.

    Without `eval.benchmarks` they are the world's own. Uids begin with the benchmark's name.
    """
    files = [Path(f) for f in config.eval.benchmarks]
    if not files and config.world.kind == "miniwiki":
        files = [world / "questions" / f"{h}hop.jsonl" for h in range(1, config.world.hops + 1)]
    names = [path.name.removesuffix(".gz").removesuffix(".jsonl") for path in files]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"config.eval.benchmarks={', '.join(map(str, files))}: two files of one name; "
            "results are told apart by it, so rename one"
        )
    return {
        name: tuple(
            dataclasses.replace(q, uid=f"{name}/{q.uid}")
            for q in read_questions(path)[: config.eval.questions]
        )
        for name, path in zip(names, files, strict=True)
    }


def score(groups: Sequence[Group], *, judged: bool = False) -> dict[str, float | None]:
    """EM and F1 of a benchmark in 0..100: means over questions of means over finished samples.

    With `judged` also `judge`, the same mean of the verdicts, and `judge_lost`, the samples that
    got none. `count` and `unjudged` are questions: with and without a finished sample. A score is
    None where there is nothing to take it from: a tool that is down is no wrong answer.
    """
    finished = [
        [rollout.answer or "" for rollout in group.rollouts if not rollout.failed]
        for group in groups
    ]
    answered = [
        (group.question.answers, said) for group, said in zip(groups, finished, strict=True) if said
    ]
    row = {
        "em": _percent([[exact_match(s, golds) for s in said] for golds, said in answered]),
        "f1": _percent([[f1(s, golds) for s in said] for golds, said in answered]),
        "count": len(answered),
        "unjudged": len(groups) - len(answered),
    }
    if judged:
        verdicts = sum(len(group.judged) for group in groups)
        row["judge"] = _percent([group.judged for group in groups if group.judged])
        row["judge_lost"] = sum(map(len, finished)) - verdicts
    return row


def _percent(samples: Sequence[Sequence[float]]) -> float | None:
    return 100 * statistics.fmean(map(statistics.fmean, samples)) if samples else None


def summarise(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """`{"benchmarks": {name: scores}, "general_avg", "multihop_avg", "avg"}`; averages of EM, over
    the benchmarks that have one. Where verdicts are among the scores, `judge_avg` of them too.
    """

    def mean(names: Sequence[str], key: str = "em") -> float | None:
        found = [scores[name].get(key) for name in names if name in scores]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None

    summary = {
        "benchmarks": {name: dict(own) for name, own in scores.items()},
        "general_avg": mean(GENERAL),
        "multihop_avg": mean(MULTI_HOP),
        "avg": mean(tuple(scores)),
    }
    if any("judge" in own for own in scores.values()):
        summary["judge_avg"] = mean(tuple(scores), "judge")
    return summary


def examine(
    examiner: Examiner,
    questions: Mapping[str, Sequence[Question]],
    how: EvalConfig,
    *,
    randomness: Sequence[object],
    watch: Watch | None = None,
) -> tuple[dict[str, Any], tuple[Group, ...]]:
    """All benchmarks in one stream of slots; the summary, and every group."""
    everything = [q for own in questions.values() for q in own]
    groups = examiner.answer(everything, how, randomness=randomness, watch=watch)
    scores, start = {}, 0
    for name, own in questions.items():
        scores[name] = score(
            groups[start : start + len(own)], judged=examiner.config.judge.kind != "exact"
        )
        start += len(own)
    return summarise(scores), groups


def watching(progress: Progress) -> Watch:
    """Shows how many trajectories have ended, as far as their turns tell.

    One that ends for want of room or turns is not seen to end, so the count may stay below all.
    """
    ended = 0

    def watch(_uid: str, turn: Turn) -> None:
        nonlocal ended
        if turn.sampled and turn.act in (Act.ANSWER, Act.NONE):
            ended += 1
            progress.update(ended)

    return watch


def metrics_row(summary: Mapping[str, Any]) -> dict[str, float]:
    """`eval/<benchmark>/em` and `eval/avg/em` of a summary, as far as there are any, and the same
    of `judge`.
    """
    row = {
        f"eval/{name}/{key}": own.get(key)
        for key in ("em", "judge")
        for name, own in summary["benchmarks"].items()
    }
    row |= {"eval/avg/em": summary["avg"], "eval/avg/judge": summary.get("judge_avg")}
    return {name: value for name, value in row.items() if value is not None}
