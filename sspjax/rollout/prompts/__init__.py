"""What the roles are told, and how tool results are shown to them.

Three concerns, one module each: the texts (`ssp`, `tiny`; `prompt_set` says what a set must have),
the message layout that puts control tokens around them (`layout`), and what comes from outside:
`neutral` makes it harmless, `compose` fills it into prompts, `observation` into tool turns.
"""

from collections.abc import Mapping

from sspjax.rollout.prompts.compose import (
    PromptTooLong,
    act_text,
    proposer_prompt,
    reader_prompt,
    solver_prompt,
)
from sspjax.rollout.prompts.neutral import neutralise
from sspjax.rollout.prompts.observation import observation_turn, smallest_observation
from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.rollout.prompts.ssp import SSP
from sspjax.rollout.prompts.tiny import TINY

PROMPTS: Mapping[str, PromptSet] = {"ssp": SSP, "tiny": TINY}
"""By `model.prompts`."""

__all__ = [
    "PROMPTS",
    "PromptSet",
    "PromptTooLong",
    "act_text",
    "neutralise",
    "observation_turn",
    "proposer_prompt",
    "reader_prompt",
    "smallest_observation",
    "solver_prompt",
]
