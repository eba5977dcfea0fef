"""From a proposer's trajectory to the question it asks."""

from __future__ import annotations

import re

from sspjax.types import Act, Question, Seed, Trajectory

_STRAY = re.compile(r"</?answer>|</\s*$", re.IGNORECASE)
"""Answer tags, and a closing tag that was cut off."""


def parse_question(trajectory: Trajectory) -> Question | None:
    """The question asked, or None when there is none.

    SSP takes the first `<question>...</question>` of the response. A turn ends when its tag
    completes and a question ends the trajectory, so the first is the last here. The question is
    named after its trajectory; answer and aliases are its seed's, and the evidence is every
    document a tool showed: the prompt and the proposer's own words are never evidence.

    Raises ValueError when the trajectory did not start from a seed with an answer.
    """
    seed = trajectory.prompt.subject
    if not isinstance(seed, Seed) or seed.answer is None:
        raise ValueError(
            f"trajectory {trajectory.uid}: expected a proposer's prompt about a seed with an "
            f"answer, got {seed!r}; check seeds.kind"
        )
    asked = [turn.argument for turn in trajectory.turns if turn.act is Act.QUESTION]
    text = _STRAY.sub("", asked[-1]).strip() if asked and not trajectory.failed else ""
    if not text:
        return None
    return Question(
        uid=trajectory.uid,
        text=text,
        answer=seed.answer,
        aliases=seed.aliases,
        evidence=trajectory.documents,
    )
