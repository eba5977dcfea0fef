"""Who decides what is right in this run, and who reads where that is not a policy.

The one place where `judge.*` becomes objects. A run that judges by exact match has a referee that
asks nobody.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sspjax.config import JudgeConfig, RunConfig
from sspjax.errors import UserError
from sspjax.judges.audit import audit
from sspjax.judges.chat import Chat, Lost, chat_request, said
from sspjax.judges.clerk import Clerk, together
from sspjax.judges.journal import Journal
from sspjax.judges.llm import LlmJudge, verdict
from sspjax.judges.reader import ChatReader
from sspjax.self_play.judge import JUDGES, Judge
from sspjax.types import Message


class JudgeError(UserError, RuntimeError):
    """The judge cannot be asked at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Referee:
    """Judge and reader of a run, with the clerks who ask for them."""

    config: JudgeConfig
    judge: Judge
    reader: ChatReader | None = None
    """None: a policy reads."""
    chat: Chat | None = None
    """None: nobody is asked."""
    clerks: tuple[Clerk, ...] = ()

    def check(self) -> None:
        """Raises JudgeError unless the service answers: said at the start, not after a step."""
        if self.chat is None:
            return
        hello = chat_request(
            [Message(author="user", content="Reply with one word: Ready")],
            model=self.config.model,
            temperature=0.0,
            max_tokens=self.config.max_tokens,
            about={},
        )
        (reply,) = together(self.chat.complete, [hello], lambda *_: None)
        if isinstance(reply, Lost):
            raise JudgeError(
                f"config.judge.url={self.config.url}: {self.config.model} does not answer: "
                f"{reply.reason}; see that the service is up and serves this model, and run again"
            )

    def audit(self, step: int) -> dict[str, float]:
        """`judge/audit_agreement` in the steps in which there is an audit; 0 is the start."""
        every = self.config.audit_every
        if self.chat is None or not isinstance(self.judge, LlmJudge) or not every or step % every:
            return {}
        share = audit(self.chat.complete, self.config)
        return {} if share is None else {"judge/audit_agreement": share}

    def take_counts(self) -> dict[str, float]:
        """What was asked since the last call; the same names every time."""
        return {k: v for clerk in self.clerks for k, v in clerk.take_counts().items()}


def open_referee(
    config: RunConfig, folder: Path, *, records: bool, environ: Mapping[str, str] = os.environ
) -> Referee:
    """The referee that the config asks for; its journals are in `folder`.

    Args:
      records: whether they may be written to.

    Raises:
      JudgeError: the key is not where `judge.api_key_variable` says.
    """
    wants_judge, wants_reader = config.judge.kind == "llm", config.verify.reader == "judge"
    if not wants_judge and not wants_reader:
        return Referee(config=config.judge, judge=JUDGES[config.judge.kind])
    own = config.judge
    chat = Chat(
        own.url,
        key=api_key(own.api_key_variable, environ),
        concurrency=own.concurrency,
        timeout=own.timeout,
        tries=own.tries,
        backoff=own.backoff,
    )

    def clerk(name: str, accept: Callable[[str], bool]) -> Clerk:
        journal = Journal(folder / f"{name}.jsonl", records=records)
        return Clerk(name, chat.complete, journal, accept)

    verdicts = clerk("judge", lambda reply: verdict(reply) is not None) if wants_judge else None
    readings = clerk("reader", lambda reply: bool(said(reply))) if wants_reader else None
    return Referee(
        config=own,
        judge=JUDGES[own.kind] if verdicts is None else LlmJudge(verdicts, own),
        reader=None if readings is None else ChatReader(readings, own, config.verify),
        chat=chat,
        clerks=tuple(c for c in (verdicts, readings) if c is not None),
    )


def api_key(variable: str, environ: Mapping[str, str]) -> str:
    """The key in an environment variable; empty where no variable is named. Never shown."""
    if not variable:
        return ""
    key = environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        found = "something that is no key" if key else "nothing"
        raise JudgeError(
            f"config.judge.api_key_variable={variable}: expected the key of {variable} in the "
            f"environment, found {found}; set it, or leave the name empty to send none"
        )
    return key
