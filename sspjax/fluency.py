"""How likely the frozen start of a run finds its proposer's questions.

What the gate needs from the world: the trainer's scoring program, the tokenizer, and demonstrations
of the training worlds to say what is usual. The rule itself is in `self_play/gates.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sspjax.config import RunConfig
from sspjax.demonstrations import proposer_demonstrations
from sspjax.rollout.acts import act_tokens
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.trainer import Trainer
from sspjax.types import Act, Params, Trajectory
from sspjax.warm_start import world_scripts

log = logging.getLogger(__name__)

DEMONSTRATIONS = 256
"""Enough for the 5% quantile to rest on a dozen of them."""


def least_logprobs(
    trainer: Trainer, params: Params, tokenizer: Tokenizer, trajectories: Sequence[Trajectory]
) -> list[float]:
    """Log-probability of the least likely token of each trajectory's question, under `params`.

    In the proposer's context and at its temperature; the tokens are `question_tokens`. Every
    trajectory ends with a question.
    """
    policy = trainer.config.proposer.policy
    scored = trainer.score(params, trajectories, policy=policy)
    return [
        float(np.min(logprobs[question_tokens(tokenizer, trajectory)]))
        for logprobs, trajectory in zip(scored, trajectories, strict=True)
    ]


def question_tokens(tokenizer: Tokenizer, trajectory: Trajectory) -> slice:
    """Where in the response the question stands: its text and closing tag, no more."""
    turn = trajectory.turns[-1]
    before = len(trajectory.token_ids) - len(turn.token_ids)
    within = act_tokens(tokenizer.pieces(turn.token_ids), Act.QUESTION)
    return slice(before + within.start, before + within.stop)


def demonstrated(
    config: RunConfig, trainer: Trainer, params: Params, tokenizer: Tokenizer
) -> list[float]:
    """`least_logprobs` of fresh proposer demonstrations of the training worlds.

    The run's own world is not among them, so nothing is learnt about it.
    """
    made = proposer_demonstrations(
        world_scripts(config, tokenizer), config.warm_start, DEMONSTRATIONS, config.seed
    )
    return least_logprobs(trainer, params, tokenizer, made)
