"""Questions to numbers: the benchmarks, answered by the same roles, tools and programs as training.

    python -m sspjax.evaluate --config=configs/tiny.py --workdir=DIR --out=results.json
        [--mode=agent|rag|closed_book] [--temperature=1.0] [--samples=4]

`agent` searches over several turns, `rag` reads what one search of the question finds,
`closed_book` answers from memory. Writes results.json and results.jsonl (every trajectory).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sspjax.config import RunConfig
from sspjax.data.answers import read_questions
from sspjax.players import Players
from sspjax.retrieval.client import Retriever
from sspjax.rollout.prompts import PROMPTS, reader_prompt, solver_prompt
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.self_play.exact import f1
from sspjax.self_play.judge import JUDGES, judge_groups
from sspjax.types import Document, Group, Prompt, Question, Role

log = logging.getLogger(__name__)

GENERAL = ("nq", "triviaqa", "popqa")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "2hop", "3hop", "4hop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examiner:
    """Poses questions in one of the three modes."""

    config: RunConfig
    players: Players
    tokenizer: Tokenizer
    retriever: Retriever

    def answer(
        self,
        questions: Sequence[Question],
        *,
        mode: str,
        temperature: float,
        samples: int = 1,
        randomness: Sequence[object] = ("evaluation",),
    ) -> tuple[Group, ...]:
        """One judged group of `samples` rollouts for each question."""
        prompts = [p for p in self._prompts(questions, mode) for _ in range(samples)]
        role = Role.READER if mode == "rag" else Role.SOLVER
        rules = self.players.rules(role, tools=mode == "agent", temperature=temperature)
        if mode == "closed_book":
            rules = dataclasses.replace(rules, max_turns=1)
        rollouts = self.players.play(role, prompts, rules=rules, randomness=randomness)
        groups = [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
        return judge_groups(questions, groups, JUDGES[self.config.judge.kind])

    def _prompts(self, questions: Sequence[Question], mode: str) -> list[Prompt]:
        prompt_set = PROMPTS[self.config.model.prompts]
        if mode != "rag":
            limit = self.config.solver.prompt_tokens
            return [solver_prompt(prompt_set, self.tokenizer, q, q.uid, limit) for q in questions]
        found = self.retriever.search([q.text for q in questions], self.config.retrieval.topk)
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
            raise ValueError(
                f"question {question.uid}: longer than config.verify.prompt_tokens={limit}; raise it"
            )
        return prompt


def benchmarks(config: RunConfig, world: Path) -> dict[str, tuple[Question, ...]]:
    """Benchmark name to its first `eval.questions` questions; uids carry the benchmark's name."""
    files = [Path(f) for f in config.eval.benchmarks]
    if not files and config.world.kind == "miniwiki":
        files = [world / "questions" / f"{h}hop.jsonl" for h in range(1, config.world.hops + 1)]
    return {
        name: tuple(
            dataclasses.replace(q, uid=f"{name}/{q.uid}")
            for q in read_questions(path)[: config.eval.questions]
        )
        for path in files
        for name in [path.name.split(".")[0]]
    }


def score(groups: Sequence[Group]) -> dict[str, float]:
    """EM and F1 of a benchmark in 0..100: means over questions of means over judged samples."""
    judged = [g for g in groups if g.judged]
    f1s = [
        statistics.fmean(
            f1(rollout.answer or "", group.question.answers)
            for rollout, correct in zip(group.rollouts, group.correct, strict=True)
            if correct is not None
        )
        for group in judged
    ]
    return {
        "em": 100 * statistics.fmean(g.success_rate or 0.0 for g in judged) if judged else 0.0,
        "f1": 100 * statistics.fmean(f1s) if f1s else 0.0,
        "count": len(judged),
        "unjudged": len(groups) - len(judged),
    }


def summarise(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """`{"benchmarks": {name: scores}, "general_avg", "multihop_avg", "avg"}`; averages of EM."""

    def mean(names: Sequence[str]) -> float | None:
        known = [scores[name]["em"] for name in names if name in scores]
        return statistics.fmean(known) if known else None

    return {
        "benchmarks": {name: dict(own) for name, own in scores.items()},
        "general_avg": mean(GENERAL),
        "multihop_avg": mean(MULTI_HOP),
        "avg": mean(tuple(scores)),
    }


def examine(
    examiner: Examiner,
    questions: Mapping[str, Sequence[Question]],
    *,
    mode: str,
    temperature: float,
    samples: int = 1,
    randomness: Sequence[object] = ("evaluation",),
) -> tuple[dict[str, Any], tuple[Group, ...]]:
    """All benchmarks in one stream of slots; the summary, and every group."""
    everything = [q for own in questions.values() for q in own]
    groups = examiner.answer(
        everything, mode=mode, temperature=temperature, samples=samples, randomness=randomness
    )
    scores, start = {}, 0
    for name, own in questions.items():
        scores[name] = score(groups[start : start + len(own)])
        start += len(own)
    return summarise(scores), groups


def metrics_row(summary: Mapping[str, Any]) -> dict[str, float]:
    """`eval/<benchmark>/em` and `eval/avg/em` of a summary."""
    row = {f"eval/{name}/em": own["em"] for name, own in summary["benchmarks"].items()}
    return row | ({"eval/avg/em": summary["avg"]} if row else {})


def write_results(
    path: Path, summary: Mapping[str, Any], groups: Sequence[Group], origin: Mapping[str, Any]
) -> None:
    """results.json, and beside it a .jsonl with what was said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**summary, **origin}, indent=2) + "\n")
    with path.with_suffix(".jsonl").open("w") as file:
        for group in groups:
            for rollout, correct in zip(group.rollouts, group.correct, strict=True):
                row = {
                    "id": group.question.uid,
                    "question": group.question.text,
                    "answers": list(group.question.answers),
                    "answer": rollout.answer,
                    "correct": correct,
                    "stop": rollout.stop.value,
                    "turns": [
                        {
                            "sampled": t.sampled,
                            "act": t.act.value,
                            "text": t.text,
                            "documents": [d.id for d in t.documents],
                        }
                        for t in rollout.turns
                    ],
                }
                file.write(json.dumps(row) + "\n")
