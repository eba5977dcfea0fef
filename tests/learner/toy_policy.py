"""A policy of a few hundred parameters, and trajectories for it."""

import jax
import jax.numpy as jnp
import numpy as np

from sspjax.config import freeze
from sspjax.learner.loss import PolicyModel
from sspjax.types import Act, Example, Prompt, Role, Seed, Stop, Trajectory, Turn

VOCABULARY = 17
WIDTH = 8


def _hidden(params, tokens, positions, segments):
    """Mean over the tokens of the same segment up to here: wrong packing changes the numbers."""
    index = jnp.arange(tokens.shape[1])
    seen = (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index[None])[None]
    seen = seen.astype(jnp.float32)
    weight = seen / jnp.sum(seen, axis=-1, keepdims=True)
    place = jnp.sin(positions.astype(jnp.float32))[..., None] * params["place"][None, None]
    x = params["embedding"][tokens] + place
    return jnp.tanh(x + jnp.einsum("rij,rjd->rid", weight, x))


def _unembed(params, hidden):
    return jnp.einsum("...d,dv->...v", hidden, params["head"])


TOY = PolicyModel(_hidden, _unembed)

BIGRAM = PolicyModel(
    lambda params, tokens, positions, segments: params["table"][tokens],
    lambda params, hidden: hidden,
)
"""Logits are a row of `table` [V, V]: gradients can be written down."""

FREE = PolicyModel(lambda params, *_: params["logits"], lambda params, hidden: hidden)
"""Logits are the parameters themselves, [R, L, V]."""


def toy_params(key):
    embedding, place, head = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(embedding, (VOCABULARY, WIDTH)),
        "place": jax.random.normal(place, (WIDTH,)),
        "head": jax.random.normal(head, (WIDTH, VOCABULARY)),
    }


def toy_config(*, proposer=(), solver=(), learner=(), **groups):
    """Eight questions of three rollouts, trajectories of at most 12 tokens, rows of 32."""
    role = {"prompt_tokens": 4, "response_tokens": 8, "max_turns": 3}
    return freeze(
        {
            "world": {"kind": "miniwiki"},
            "batch": 8,
            "proposer": role | dict(proposer),
            "solver": role | {"group_size": 3} | dict(solver),
            "learner": {"row_tokens": 32, "kl": 0.0, "learning_rate": 0.01, "warmup": 0}
            | dict(learner),
            **groups,
        }
    )


def trajectory(rng, role=Role.SOLVER, group="g", prompt=3, turns=(2, -2, 2), uid="t"):
    """A trajectory of random tokens; `turns` are lengths, negative for a tool's."""
    made = [
        Turn(
            token_ids=rng.integers(0, VOCABULARY, abs(n), dtype=np.int32),
            logprobs=(-rng.uniform(0.5, 4, n) if n > 0 else np.zeros(-n)).astype(np.float32),
            sampled=n > 0,
            text="",
            act=Act.SEARCH if n > 0 else Act.NONE,
        )
        for n in turns
    ]
    start = Prompt(
        role=role,
        subject=Seed(uid="s", answer="a"),
        group=group,
        messages=(),
        token_ids=rng.integers(0, VOCABULARY, prompt, dtype=np.int32),
    )
    return Trajectory(uid=uid, prompt=start, turns=tuple(made), stop=Stop.ANSWER, policy_step=0)


def demonstration(rng, **kwargs):
    """The same with every turn forced."""
    made = trajectory(rng, **kwargs)
    turns = tuple(
        Turn(token_ids=t.token_ids, logprobs=0 * t.logprobs, sampled=False, text="", act=t.act)
        for t in made.turns
    )
    return Trajectory(uid=made.uid, prompt=made.prompt, turns=turns, stop=made.stop, policy_step=0)


def example(trajectory, advantage):
    return Example(trajectory=trajectory, reward=0.0, advantage=advantage, terms={})


def toy_examples(rng, role=Role.SOLVER, groups=4, size=3):
    """Groups of trajectories with lengths from 4 to 12 tokens and advantages around 0."""
    shapes = [(2, -2, 2), (1,), (4, -1, 3), (3, -3, 1), (5,)]
    return [
        example(
            trajectory(
                rng,
                role,
                group=f"{role.name}{g}",
                prompt=int(rng.integers(1, 5)),
                turns=shapes[int(rng.integers(len(shapes)))],
                uid=f"{role.name}/{g}/{i}",
            ),
            float(rng.normal()),
        )
        for g in range(groups)
        for i in range(size)
    ]
