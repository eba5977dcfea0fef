"""The trained policies on the global mesh: made, updated, and described for checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sspjax.config import RunConfig
from sspjax.demonstrations import turn_weight
from sspjax.islands import sharded
from sspjax.learner.divergence import divergences, numbered
from sspjax.learner.loss import PolicyModel
from sspjax.learner.optimizer import learning_rates, make_optimizer, updated_roles
from sspjax.learner.pack import (
    pack,
    pack_demonstrations,
    pack_unweighted,
    role_spans,
    update_shape,
)
from sspjax.learner.scoring import make_reference_logprobs
from sspjax.learner.state import (
    init_state,
    loss_constants,
    policy_names,
    reset_optimizer,
    state_from_params,
    state_shardings,
)
from sspjax.learner.update import make_update
from sspjax.mesh import Layout
from sspjax.models.decoder import Model, cast_params, init_params, parameter_shardings
from sspjax.models.presets import DecoderConfig
from sspjax.models.weights import load_params
from sspjax.types import (
    Example,
    Params,
    PolicyState,
    Role,
    TrainState,
    Trajectory,
    UpdateBatch,
)

Row = dict[str, float]


class Trainer:
    """Packs what was played, places it on the mesh, and runs the one update program."""

    def __init__(self, config: RunConfig, decoder: DecoderConfig, layout: Layout):
        self.config = config
        self.layout = layout
        model = Model(
            decoder,
            layout,
            jnp.dtype(config.model.dtype),
            block=config.model.attention_block,
            remat=config.model.remat,
        )
        policy_model = PolicyModel(model.hidden, model.unembed)
        self._decoder = decoder
        self._names = policy_names(config)
        self._optimizer = make_optimizer(config.learner)
        self._params_shardings = parameter_shardings(decoder, layout)
        self._shardings = state_shardings(
            self._params_shardings, self._optimizer, self._names, layout.mesh
        )
        ways = layout.ways("batch")
        self._shapes = {n: update_shape(config, n, batch_devices=ways) for n in self._names}
        batch_sharding = layout.sharding(("micro", "batch", "length"), (1, ways, 1))
        self._update = make_update(
            policy_model,
            self._optimizer,
            config,
            shardings=self._shardings,
            batch_sharding=batch_sharding,
        )
        self._reference = make_reference_logprobs(
            policy_model, config, batch_sharding=batch_sharding
        )
        self._whole = jax.jit(lambda x: x, out_shardings=layout.replicated())
        self._constants = loss_constants(config)

    @property
    def needs_reference(self) -> bool:
        """A run without KL and without a fluency gate holds no reference."""
        c = self.config
        return c.learner.kl > 0 or c.learner.kl_reward > 0 or c.verify.fluency_quantile > 0

    def start(self) -> TrainState:
        """Every policy at step 0: the given weights, or random parameters, made sharded.

        Raises ModelFolderError or GgufError where the weights cannot be read.
        """
        own = self.config.model
        if not own.weights:
            key = jax.random.key(self.config.seed)
            return init_state(self._init, self._optimizer, self._names, key, self._shardings)
        params = load_params(
            own.weights,
            self._decoder,
            self.layout,
            jnp.float32,
            check_finite=own.check_finite,
        )
        return state_from_params(params, self._optimizer, self._names, self._shardings)

    def abstract(self) -> TrainState:
        """Shapes and shardings of a state, for restoring into."""
        shapes = jax.eval_shape(
            lambda key: init_state(self._init, self._optimizer, self._names, key), jax.random.key(0)
        )
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings
        )

    def reset_optimizer(self, state: TrainState) -> TrainState:
        """The same parameters at step 0: the warm start hands over. Donates `state`."""
        return reset_optimizer(state, self._optimizer, self._shardings)

    def reference(self, state: TrainState) -> dict[str, Params]:
        """Frozen copies of every policy's parameters, in the model's dtype."""
        dtype = jnp.dtype(self.config.model.dtype)
        copy = jax.jit(
            lambda params: cast_params(params, dtype), out_shardings=self._params_shardings
        )
        return {name: copy(policy.params) for name, policy in state.policies.items()}

    def abstract_reference(self) -> dict[str, Params]:
        """Shapes and shardings of `reference`, for restoring into."""
        dtype = jnp.dtype(self.config.model.dtype)
        return {
            name: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), policy.params
            )
            for name, policy in self.abstract().policies.items()
        }

    def update(
        self,
        state: TrainState,
        examples: Mapping[Role, Sequence[Example]],
        reference: Mapping[str, Params],
        step: int,
    ) -> tuple[TrainState, Row]:
        """One self-play step's optimizer steps, all roles and policies. Donates `state`."""
        batches = {}
        learning = updated_roles(self.config, step)
        for name in self._names:
            roles = [span.role for span in role_spans(self.config, name)]
            own = {role: examples[role] for role in roles if role in learning}
            batches[name] = self._placed(pack(own, self.config, self._shapes[name]))
            if self.config.learner.kl > 0:
                batches[name] = self._reference(reference[name], batches[name], self._constants)
        return self._run(state, batches, learning_rates(self.config, step))

    def divergences(
        self, played: Mapping[Role, Sequence[Trajectory]], reference: Mapping[str, Params]
    ) -> dict[Role, np.ndarray]:
        """Each trajectory's divergence from the frozen start, f64[n]; 0 for what is not trained."""
        found = {role: np.zeros(len(own)) for role, own in played.items()}
        for name in self._names:
            examples: dict[Role, list[Example]] = {}
            places: list[tuple[Role, int]] = []
            for span in role_spans(self.config, name):
                own = played[span.role]
                kept = [i for i, t in enumerate(own) if not t.failed]
                examples[span.role] = numbered([own[i] for i in kept], len(places) + 1)
                places += [(span.role, i) for i in kept]
            batch = pack(examples, self.config, self._shapes[name])
            scored = self._reference(reference[name], self._placed(batch), self._constants)
            logprob = np.asarray(self._whole(scored.reference_logprob))
            sums = divergences(batch, logprob, len(places))
            for (role, i), value in zip(places, sums, strict=True):
                found[role][i] = value
        return found

    def score(
        self, params: Params, trajectories: Sequence[Trajectory], *, policy: str
    ) -> list[np.ndarray]:
        """Log-probability of every response token, f32[response length] each, in every process.

        By the program that scores a policy's update batch under its frozen start, at the
        temperature of the trajectory's role; it runs at least once, so that it is compiled in the
        first step whatever there is to score.

        Args:
          params: in the form of a policy's `reference`.
          trajectories: of any number; the same in every process.
          policy: whose batch shape to use.
        """
        scored: dict[int, np.ndarray] = {}
        for packed in pack_unweighted(trajectories, self._shapes[policy]):
            batch = self._reference(params, self._placed(packed.batch), self._constants)
            logprobs = np.asarray(self._whole(batch.reference_logprob))
            for i, place in packed.places.items():
                scored[i] = logprobs[place.micro_batch, place.row, place.start : place.stop]
        return [scored[i] for i in range(len(trajectories))]

    def teach(
        self, state: TrainState, demonstrations: Sequence[Trajectory], rate: float
    ) -> tuple[TrainState, Row]:
        """One warm-start step: every policy learns every role's demonstrations by likelihood."""
        weight = turn_weight(self.config.warm_start)
        batches = {
            name: self._placed(
                pack_demonstrations(demonstrations, self._shapes[name], turn_weight=weight)
            )
            for name in self._names
        }
        return self._run(state, batches, np.full(len(Role), rate, np.float32))

    def _init(self, key: jax.Array) -> Params:
        return init_params(self._decoder, key)

    def _run(
        self, state: TrainState, batches: Mapping[str, UpdateBatch], rates: np.ndarray
    ) -> tuple[TrainState, Row]:
        state, metrics = self._update(state, batches, self._constants, rates)
        return state, {name: float(x) for name, x in jax.device_get(metrics).items()}

    def _placed(self, batch: UpdateBatch) -> UpdateBatch:
        """The host batch, which every process packed alike, as global arrays."""
        axes: dict[str, Any] = {"micro_stop": (None,)}
        return UpdateBatch(
            **{
                field.name: sharded(
                    self.layout, x, axes.get(field.name, ("micro", "batch", "length"))
                )
                for field in dataclasses.fields(UpdateBatch)
                for x in [vars(batch)[field.name]]
            }
        )


def abstract_policies(config: RunConfig, decoder: DecoderConfig, layout: Layout) -> TrainState:
    """Shapes and shardings of a state without its optimizer, for restoring what can play."""
    shapes = jax.eval_shape(lambda key: init_params(decoder, key), jax.random.key(0))
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        parameter_shardings(decoder, layout),
    )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated())
    return TrainState(
        step=step,
        policies={n: PolicyState(params=params, opt_state=None) for n in policy_names(config)},
    )
