"""Does the judge still judge? Its verdicts on a fixed set, beside those of exact match.

The set (`audit.jsonl`) has claims on which exact match is beyond doubt: an accepted answer written
otherwise, or plainly another one. A model that disagrees has been exchanged, is broken, or follows
what answers tell it to do. The journal is neither read nor written: the question is about today.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from sspjax.config import JudgeConfig
from sspjax.judges.chat import Lost
from sspjax.judges.clerk import Complete, together
from sspjax.judges.llm import claim_request, verdict
from sspjax.self_play.judge import Claim, exact
from sspjax.types import Question

log = logging.getLogger(__name__)


@functools.cache
def fixed_claims() -> tuple[Claim, ...]:
    """The set: half of it right."""
    text = (Path(__file__).parent / "audit.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return tuple(
        Claim(
            question=Question(
                uid=f"audit/{i}",
                text=row["question"],
                answer=row["answers"][0],
                aliases=tuple(row["answers"][1:]),
            ),
            answer=row["given"],
        )
        for i, row in enumerate(rows)
    )


def agreement(verdicts: Sequence[bool | None], expected: Sequence[bool]) -> float | None:
    """Share of the verdicts that are as expected; None where there is none."""
    given = [(v, e) for v, e in zip(verdicts, expected, strict=True) if v is not None]
    return sum(v == e for v, e in given) / len(given) if given else None


def audit(complete: Complete, config: JudgeConfig) -> float | None:
    """Asks the model about the fixed set; logs an alarm below `config.audit_floor`.

    An alarm too where there was no verdict at all, which gives None.
    """
    claims = fixed_claims()
    replies = together(complete, [claim_request(c, config) for c in claims], lambda *_: None)
    verdicts = [None if isinstance(reply, Lost) else verdict(reply) for reply in replies]
    share = agreement(verdicts, exact(claims))
    if share is None:
        log.error("ALARM judge audit: not one of %d claims got a verdict", len(claims))
    elif share < config.audit_floor:
        log.error(
            "ALARM judge audit: %s agrees with exact match on %.0f%% of %d claims, fewer than "
            "config.judge.audit_floor=%s; see which model answers at %s",
            config.model,
            100 * share,
            sum(v is not None for v in verdicts),
            config.audit_floor,
            config.url,
        )
    return share
