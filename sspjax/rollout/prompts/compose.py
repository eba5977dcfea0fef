"""Prompts of the three roles.

A prompt longer than its limit is refused. The reference implementation cuts prompts from the left,
which removes the instructions first and trains on a task that the policy was never told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sspjax.errors import UserError
from sspjax.rollout.prompts.layout import prompt_ids
from sspjax.rollout.prompts.neutral import neutralise
from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.types import Act, Document, Message, Prompt, Question, Role, Seed


class PromptTooLong(UserError, ValueError):
    """A proposer's or solver's prompt does not fit; the message names the key to raise."""


def proposer_prompt(
    prompt_set: PromptSet, tokenizer: Tokenizer, seed: Seed, group: str, limit: int
) -> Prompt:
    """Asks for a question whose answer is the seed's. Raises PromptTooLong over `limit` tokens,
    ValueError for a seed without an answer.
    """
    if seed.answer is None:
        raise ValueError(
            f"seed {seed.uid}: expected an answer, which prompt set {prompt_set.name} starts from, "
            "got none; check seeds.kind"
        )
    fields = {"answer": _outside(prompt_set, seed.answer), "hops": str(seed.hops)}
    prompt = _prompt(
        prompt_set, tokenizer, Role.PROPOSER, seed, group, prompt_set.proposer, fields, ()
    )
    return _fitting(prompt, limit, f"seed {seed.uid}")


def solver_prompt(
    prompt_set: PromptSet,
    tokenizer: Tokenizer,
    question: Question,
    group: str,
    limit: int,
    skills: Sequence[str] = (),
) -> Prompt:
    """Asks for the answer, by searching. Without skills the prompt has no trace of them.

    Raises PromptTooLong over `limit` tokens.
    """
    lines = "".join(prompt_set.skill.format(skill=_outside(prompt_set, s)) for s in skills)
    fields = {
        "question": _outside(prompt_set, question.text),
        "skills": prompt_set.skills.format(skills=lines) if skills else "",
    }
    prompt = _prompt(
        prompt_set, tokenizer, Role.SOLVER, question, group, prompt_set.solver, fields, ()
    )
    return _fitting(prompt, limit, f"question {question.uid}")


def reader_prompt(
    prompt_set: PromptSet,
    tokenizer: Tokenizer,
    question: Question,
    documents: Sequence[Document],
    group: str,
    limit: int,
) -> Prompt | None:
    """Asks for the answer from `documents` alone, each shown whole and in this order.

    None where that takes more than `limit` tokens: which passages to leave out is for the caller.
    """
    fields = {"question": _outside(prompt_set, question.text)}
    pieces = tuple(_document_pieces(prompt_set, documents))
    prompt = _prompt(
        prompt_set, tokenizer, Role.READER, question, group, prompt_set.reader, fields, pieces
    )
    return prompt if len(prompt.token_ids) <= limit else None


def act_text(prompt_set: PromptSet, act: Act, argument: str) -> str:
    """An act as the set's roles write it (demonstrations are made of these)."""
    return prompt_set.act.format(tag=act.value, argument=prompt_set.content(argument))


def document_text(prompt_set: PromptSet, rank: int, document: Document) -> tuple[str, str]:
    """Heading and passage as they are shown, harmless; the first document has rank 1."""
    heading = prompt_set.heading.format(rank=rank, title=_outside(prompt_set, document.title))
    return heading, prompt_set.passage.format(text=_outside(prompt_set, document.text))


def _outside(prompt_set: PromptSet, text: str) -> str:
    return prompt_set.content(neutralise(text))


def _document_pieces(prompt_set: PromptSet, documents: Sequence[Document]) -> Iterator[str]:
    if not documents:
        yield prompt_set.nothing
    for rank, document in enumerate(documents, 1):
        if rank > 1:
            yield prompt_set.separator
        yield from document_text(prompt_set, rank, document)


def _prompt(
    prompt_set: PromptSet,
    tokenizer: Tokenizer,
    role: Role,
    subject: Seed | Question,
    group: str,
    template: Sequence[Message],
    fields: Mapping[str, str],
    documents: Sequence[str],
) -> Prompt:
    filled = [(m.author, tuple(_pieces(m.content, fields, documents))) for m in template]
    return Prompt(
        role=role,
        subject=subject,
        group=group,
        messages=tuple(Message(author=a, content="".join(pieces)) for a, pieces in filled),
        token_ids=prompt_ids(prompt_set, tokenizer, filled),
    )


def _pieces(template: str, fields: Mapping[str, str], documents: Sequence[str]) -> Iterator[str]:
    """A message's text, documents as pieces of their own."""
    for part in template.partition("{documents}"):
        if part == "{documents}":
            yield from documents
        elif part:
            yield part.format_map(fields)


def _fitting(prompt: Prompt, limit: int, subject: str) -> Prompt:
    if len(prompt.token_ids) > limit:
        key = f"{prompt.role.name.lower()}.prompt_tokens"
        raise PromptTooLong(
            f"{subject}: expected a prompt of at most {limit} tokens, got {len(prompt.token_ids)}; "
            f"raise config.{key} (prompts are not cut: the instructions would go first)"
        )
    return prompt
