"""Packing: examples of any number and length into the one static shape of the update, in numpy.

A row holds whole trajectories side by side, told apart by segments. Everything that normalises the
loss is computed here, once, over a whole minibatch, and travels as one weight per token; what
happens on the device is a plain sum, so it cannot depend on rows, micro-batches or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sspjax.config import RoleConfig, RunConfig
from sspjax.types import Example, Role, Trajectory, Turn, UpdateBatch, noun, record


@noun
class RoleSpan:
    """Minibatches `start` to `stop` (exclusive) hold the examples of `role`."""

    role: Role
    start: int
    stop: int


@noun
class UpdateShape:
    """The static shape of one policy's update."""

    micro_batches: int
    """M: enough for the most and longest examples the config allows, however they fall."""
    rows: int
    """R"""
    length: int
    """L"""
    minibatches: int
    """K"""
    spans: tuple[RoleSpan, ...]
    """The roles this policy plays, in the order in which they are updated."""


def role_config(config: RunConfig, role: Role) -> RoleConfig:
    """The config group of a trained role."""
    return {Role.PROPOSER: config.proposer, Role.SOLVER: config.solver}[role]


def role_spans(config: RunConfig, policy: str) -> tuple[RoleSpan, ...]:
    """Which minibatches belong to which role, in the order of `learner.order`.

    `joint` gives every minibatch its share of both roles; their number is the larger of the two.
    """
    counts = {
        Role.SOLVER: config.learner.minibatches.solver,
        Role.PROPOSER: config.learner.minibatches.proposer,
    }
    roles = [role for role in counts if role_config(config, role).policy == policy]
    if config.learner.order == "joint":
        together = max(counts[role] for role in roles)
        return tuple(RoleSpan(role=role, start=0, stop=together) for role in roles)
    if config.learner.order == "proposer_first":
        roles.reverse()
    spans, start = [], 0
    for role in roles:
        spans.append(RoleSpan(role=role, start=start, stop=start + counts[role]))
        start += counts[role]
    return tuple(spans)


def update_shape(config: RunConfig, policy: str, *, batch_devices: int = 1) -> UpdateShape:
    """Shape of a policy's update from the config alone.

    `batch_devices`: devices over which the rows of a micro-batch are split; R is that number times
    `learner.micro_rows`.

    M is sufficient. A first-fit row is opened only when the example fits into no open row, so with
    q = floor(L / longest example) every row but the last holds q examples or more, and n examples
    fill at most ceil(n / q) rows. Summed over K minibatches, ceil(n_k / (q R)) micro-batches are at
    most floor((n + K (q R - 1)) / (q R)), wherever the minibatches are cut.
    """
    learner = config.learner
    rows = max(1, learner.micro_rows) * batch_devices
    spans = role_spans(config, policy)
    joint = learner.order == "joint"
    needed = 0
    for members in [spans] if joint else [(span,) for span in spans]:
        count = sum(_most_examples(config, span.role) for span in members)
        longest = max(_longest(role_config(config, span.role)) for span in members)
        full = rows * (learner.row_tokens // longest)
        minibatches = members[0].stop - members[0].start
        needed += (count + minibatches * (full - 1)) // full
    if config.warm_start.steps:
        # Demonstrations are of every role, whichever this policy plays.
        reader = config.verify.prompt_tokens + config.verify.answer_tokens
        longest = max(_longest(config.proposer), _longest(config.solver), reader)
        full = rows * max(1, learner.row_tokens // longest)
        needed = max(needed, math.ceil(config.warm_start.batch / full))
    return UpdateShape(
        micro_batches=max(needed, 1),
        rows=rows,
        length=learner.row_tokens,
        minibatches=max(span.stop for span in spans),
        spans=spans,
    )


def _longest(role: RoleConfig) -> int:
    return role.prompt_tokens + role.response_tokens


def _most_examples(config: RunConfig, role: Role) -> int:
    """Examples of a role in one step: every proposal may become a question with its own group."""
    if role_config(config, role).role_weight == 0:
        return 0
    proposals = config.batch * config.proposer.group_size
    return proposals if role is Role.PROPOSER else proposals * config.solver.group_size


# Loss aggregation: the weight of one token of each sequence --------------------------------------

Aggregation = Callable[[np.ndarray, int], np.ndarray]
"""(trained tokens of each sequence i[n], the role's response budget) to token weights f64[n].

The sequences are those of one role in one minibatch that have any trained token (verl's names and,
since it too normalises over the whole minibatch, verl's current meaning).
"""


def token_mean(tokens: np.ndarray, response_tokens: int) -> np.ndarray:
    """Mean over all tokens: a long trajectory counts for more (DAPO)."""
    return np.full(len(tokens), 1 / tokens.sum())


def seq_mean_token_sum(tokens: np.ndarray, response_tokens: int) -> np.ndarray:
    """Sum over a trajectory's tokens, mean over trajectories (SSP Eq 5).

    The scale grows with the length: in a joint update the longer role drowns the other.
    """
    return np.full(len(tokens), 1 / len(tokens))


def seq_mean_token_mean(tokens: np.ndarray, response_tokens: int) -> np.ndarray:
    """Mean over a trajectory's tokens, then over trajectories (SSP Eq 4, GRPO)."""
    return 1 / (len(tokens) * tokens)


def seq_mean_token_sum_norm(tokens: np.ndarray, response_tokens: int) -> np.ndarray:
    """Sum over tokens divided by the response budget, mean over trajectories (Dr. GRPO)."""
    return np.full(len(tokens), 1 / (len(tokens) * response_tokens))


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


# Examples to rows --------------------------------------------------------------------------------


class Segment(NamedTuple):
    """One trajectory on its way into a row; the arrays cover its response, f64[response length]."""

    trajectory: Trajectory
    loss_weight: np.ndarray
    kl_weight: np.ndarray
    advantage: float

    @property
    def tokens(self) -> int:
        """Length in a row: prompt and response."""
        return len(self.trajectory.prompt.token_ids) + len(self.loss_weight)


def pack(
    examples: Mapping[Role, Sequence[Example]], config: RunConfig, shape: UpdateShape
) -> UpdateBatch:
    """One policy's examples as an UpdateBatch of `shape`, in host memory.

    A role's examples are cut into its minibatches by whole groups (`prompt.group`), in order and as
    evenly as possible. Sampled tokens carry the role's aggregation times `role_weight`; prompts and
    forced tokens carry 0. An example without advantage takes no row when neither KL nor entropy
    reads it, and still counts in the normaliser. `reference_logprob` is left at 0; `old_logprob`
    starts as the behaviour's.

    Raises ValueError for a role this policy does not play, a trajectory that does not fit a row, a
    trajectory whose tool failed, an advantage that is not finite, and more than fits the shape.
    """
    minibatches: list[list[Segment]] = [[] for _ in range(shape.minibatches)]
    spans = {span.role: span for span in shape.spans}
    for role, members in examples.items():
        if role not in spans:
            raise ValueError(
                f"pack: expected examples of {', '.join(r.name for r in spans)}, got {role.name}; "
                "pack each policy's own roles"
            )
        span = spans[role]
        for k, part in enumerate(_split(members, span.stop - span.start), span.start):
            minibatches[k] += _weigh(part, role_config(config, role), config)
    return _fill(minibatches, shape)


def pack_demonstrations(
    trajectories: Iterable[Trajectory],
    shape: UpdateShape,
    *,
    turn_weight: Callable[[Turn], float],
) -> UpdateBatch:
    """Demonstrations as one minibatch of plain likelihood: every turn forced, advantage 1.

    `turn_weight` gives the weight of each token of a turn, relative to the others (say 1 for what
    the agent writes and 0.1 for what a tool shows); the batch's weights are scaled to sum to 1, so
    the gradient is that of the weighted mean of -log p, at the role's temperature.

    Raises ValueError for a turn marked as sampled (its ratio would not be one), a weight that is
    negative or not finite, and what `pack` refuses.
    """
    segments = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.sampled:
                raise ValueError(
                    f"demonstration {trajectory.uid}: expected forced turns only, got a sampled "
                    "one; a demonstration has no behaviour policy, mark its turns sampled=False"
                )
        weights = [np.full(len(t.token_ids), turn_weight(t)) for t in trajectory.turns]
        weight = np.concatenate(weights) if weights else np.zeros(0)
        if not np.all(np.isfinite(weight)) or np.any(weight < 0):
            raise ValueError(
                f"demonstration {trajectory.uid}: turn_weight must be finite and not negative"
            )
        segments.append(Segment(trajectory, weight, np.zeros_like(weight), 1.0))
    total = sum(float(s.loss_weight.sum()) for s in segments)
    weighted = [s._replace(loss_weight=s.loss_weight / total) for s in segments if total > 0]
    kept = [s for s in weighted if s.loss_weight.any()]
    return _fill([kept, *[[] for _ in range(shape.minibatches - 1)]], shape)


@noun
class Place:
    """Where a trajectory's response lies in a batch's [M, R, L] fields."""

    micro_batch: int
    row: int
    start: int
    stop: int


@record
class Unweighted:
    """A batch that nothing is learnt from, and where to find what it holds."""

    batch: UpdateBatch
    places: Mapping[int, Place]
    """By the trajectory's index."""


def pack_unweighted(
    trajectories: Sequence[Trajectory], shape: UpdateShape
) -> tuple[Unweighted, ...]:
    """Trajectories to be scored, in as many batches of `shape` as they need, and one at least.

    Each is in one batch. All weights and advantages are 0.

    Raises ValueError for a trajectory that does not fit a row or has no prompt.
    """
    nothing = [np.zeros(len(t.token_ids)) for t in trajectories]
    segments = [Segment(t, n, n, 0.0) for t, n in zip(trajectories, nothing, strict=True)]
    for segment in segments:
        _check(segment, shape)
    rows = _first_fit_decreasing([s.tokens for s in segments], shape.length)
    full = shape.micro_batches * shape.rows
    return tuple(
        _unweighted(segments, rows[first : first + full], shape)
        for first in range(0, max(1, len(rows)), full)
    )


def _unweighted(
    segments: Sequence[Segment], rows: Sequence[Sequence[int]], shape: UpdateShape
) -> Unweighted:
    """One batch of the `segments` whose indices are in `rows`."""
    places: dict[int, Place] = {}
    for r, row in enumerate(rows):
        stop = 0
        for i in row:
            stop += segments[i].tokens
            places[i] = Place(
                micro_batch=r // shape.rows,
                row=r % shape.rows,
                start=stop - len(segments[i].loss_weight),
                stop=stop,
            )
    used = math.ceil(len(rows) / shape.rows)
    filled = [[segments[i] for i in row] for row in rows]
    batch = _written(filled, [used] * shape.minibatches, shape)
    return Unweighted(batch=batch, places=places)


def _split(examples: Sequence[Example], parts: int) -> list[list[Example]]:
    """Cuts a role's examples into `parts` runs of whole groups; the first ones get the rest."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.trajectory.prompt.group, []).append(example)
    share, rest = divmod(len(groups), parts)
    members = iter(groups.values())
    return [
        [example for _ in range(share + (k < rest)) for example in next(members)]
        for k in range(parts)
    ]


def _weigh(examples: Sequence[Example], role: RoleConfig, config: RunConfig) -> list[Segment]:
    """The examples of one role in one minibatch that any term of the loss reads."""
    learner = config.learner
    for example in examples:
        if example.trajectory.failed:
            raise ValueError(
                f"trajectory {example.trajectory.uid}: its tool failed; leave it out of the loss"
            )
        if not math.isfinite(example.advantage):
            raise ValueError(
                f"trajectory {example.trajectory.uid}: expected a finite advantage, got "
                f"{example.advantage}; leave unjudged rollouts out"
            )
    trained = [(e, e.trajectory.sampled) for e in examples]
    trained = [(e, sampled) for e, sampled in trained if sampled.any()]
    if not trained or role.role_weight == 0:
        return []
    counts = np.array([sampled.sum() for _, sampled in trained])
    weights = role.role_weight * AGGREGATIONS[role.aggregation](counts, role.response_tokens)
    always_read = learner.kl != 0 or learner.entropy != 0
    return [
        Segment(e.trajectory, weight * sampled, learner.kl * weight * sampled, e.advantage)
        for (e, sampled), weight in zip(trained, weights, strict=True)
        if e.advantage != 0 or always_read
    ]


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices: longest first (ties in order), each into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _fill(minibatches: Sequence[Sequence[Segment]], shape: UpdateShape) -> UpdateBatch:
    rows: list[list[Segment]] = []
    micro_stop: list[int] = []
    for segments in minibatches:
        for segment in segments:
            _check(segment, shape)
        filled = _first_fit_decreasing([s.tokens for s in segments], shape.length)
        rows += [[segments[i] for i in row] for row in filled]
        # A minibatch starts on a micro-batch of its own; one without rows owns none.
        rows += [[]] * (-len(rows) % shape.rows)
        micro_stop.append(len(rows) // shape.rows)
    if micro_stop[-1] > shape.micro_batches:
        raise ValueError(
            f"pack: expected at most {shape.micro_batches} micro-batches of {shape.rows} rows, got "
            f"{micro_stop[-1]}; more or longer examples than the config's batch, group sizes and "
            "token budgets allow"
        )
    return _written(rows, micro_stop, shape)


def _written(
    rows: Sequence[Sequence[Segment]], micro_stop: Sequence[int], shape: UpdateShape
) -> UpdateBatch:
    arrays = _empty(shape)
    flat = {name: a.reshape(-1, shape.length) for name, a in arrays.items()}
    for r, row in enumerate(rows):
        start = 0
        for n, segment in enumerate(row, 1):
            _write({name: a[r, start:] for name, a in flat.items()}, segment, n)
            start += segment.tokens
    arrays["micro_stop"] = np.array(micro_stop, np.int32)
    return UpdateBatch(**arrays)


def _check(segment: Segment, shape: UpdateShape) -> None:
    trajectory = segment.trajectory
    if segment.tokens > shape.length:
        raise ValueError(
            f"trajectory {trajectory.uid}: expected at most {shape.length} tokens, got "
            f"{segment.tokens}; it never spans rows, raise config.learner.row_tokens"
        )
    if not len(trajectory.prompt.token_ids):
        raise ValueError(
            f"trajectory {trajectory.uid}: the prompt is empty, so nothing predicts the first "
            "token; a prompt holds at least one token"
        )


DTYPES: Mapping[str, Any] = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "sampled": np.bool_,
    "loss_weight": np.float32,
    "kl_weight": np.float32,
    "advantage": np.float32,
    "behaviour_logprob": np.float32,
    "old_logprob": np.float32,
    "reference_logprob": np.float32,
    "role": np.int32,
}
"""The [M, R, L] fields of an UpdateBatch."""


def _empty(shape: UpdateShape) -> dict[str, Any]:
    size = (shape.micro_batches, shape.rows, shape.length)
    return {name: np.zeros(size, dtype) for name, dtype in DTYPES.items()}


def _write(row: Mapping[str, np.ndarray], segment: Segment, number: int) -> None:
    """Writes a trajectory to the start of a row's views."""
    trajectory = segment.trajectory
    prompt, total = len(trajectory.prompt.token_ids), segment.tokens
    row["tokens"][:prompt] = trajectory.prompt.token_ids
    row["positions"][:total] = np.arange(total)
    row["segments"][:total] = number
    row["advantage"][:total] = segment.advantage
    row["role"][:total] = trajectory.prompt.role.value
    response = {
        "tokens": trajectory.token_ids,
        "sampled": trajectory.sampled,
        "loss_weight": segment.loss_weight,
        "kl_weight": segment.kl_weight,
        "behaviour_logprob": trajectory.logprobs,
        "old_logprob": trajectory.logprobs,
    }
    for name, values in response.items():
        row[name][prompt:total] = values
