"""Search self-play, top to bottom.

    python -m sspjax.train --config=configs/tiny.py --workdir=DIR [--config.batch=32] [--force]
        [--check-finite]

Run again with the same workdir, it resumes. `self_play_step` is the algorithm (SSP, arXiv
2510.18821, algorithm 1); what differs between systems is configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from sspjax import processes, warm_start
from sspjax.checkpoint import Checkpoints
from sspjax.command_line import load_config, parse, parser, run
from sspjax.config import ConfigError, EvalConfig, RoleConfig, RunConfig, cautions, to_dict
from sspjax.data.answers import read_answers
from sspjax.data.miniwiki import make_world, write_world
from sspjax.errors import UserError
from sspjax.examiner import Examiner, benchmarks, examine, metrics_row, summarise
from sspjax.fluency import demonstrated, least_logprobs
from sspjax.judges.referee import Referee, open_referee
from sspjax.learner.advantages import ADVANTAGES, Scores
from sspjax.mesh import Layout, train_layout
from sspjax.metrics import (
    CompileCounter,
    MetricsWriter,
    Progress,
    Timers,
    TrajectoryWriter,
    open_oracle,
    records,
    start_logging,
    truth_metrics,
)
from sspjax.models.presets import DecoderConfig, preset
from sspjax.models.weights import decoder_config_of
from sspjax.players import Players
from sspjax.retrieval.client import NamedRetriever
from sspjax.retrieval.corpus import Corpus
from sspjax.retrieval.source import open_source
from sspjax.retrieval.store import open_corpus
from sspjax.rollout.conversation import Watch
from sspjax.rollout.prompts import (
    PROMPTS,
    PromptTooLong,
    proposer_prompt,
    reader_prompt,
    smallest_observation,
    solver_prompt,
)
from sspjax.rollout.tokenizer import Tokenizer, load_tokenizer
from sspjax.self_play.board import SHORTFALL, Board, substituted
from sspjax.self_play.counts import step_counts
from sspjax.self_play.filters import first_failure
from sspjax.self_play.gates import after_solving, before_reading, fluency_threshold
from sspjax.self_play.judge import judge_groups
from sspjax.self_play.memory import host_state_from_json, host_state_to_json
from sspjax.self_play.questions import parse_question
from sspjax.self_play.replay import after_step, remember
from sspjax.self_play.rewards import Reward, penalised, reward_proposals, reward_rollouts
from sspjax.self_play.seeds import SEED_SOURCES, SeedSource
from sspjax.self_play.verify import VerifyCounts, verify
from sspjax.trainer import Trainer
from sspjax.types import (
    Document,
    Example,
    Group,
    HostState,
    Params,
    Prompt,
    Proposal,
    Question,
    Reason,
    Role,
    Seed,
    TrainState,
    Trajectory,
)
from sspjax.workdir import Workdir

log = logging.getLogger(__name__)

# ==================================================================================================
# One step
# ==================================================================================================


@dataclasses.dataclass(frozen=True, kw_only=True)
class Game:
    """Everything a step needs of the world; built once, changes nothing of the result."""

    config: RunConfig
    seeds: SeedSource
    tokenizer: Tokenizer
    players: Players
    referee: Referee
    trainer: Trainer
    reference: Mapping[str, Params]
    """Frozen start of every policy, for the KL term and the fluency gate; empty without both."""
    fluency_threshold: float
    """Lowest log-probability that passes the fluency gate; -inf where it is off."""
    timers: Timers


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """One self-play step: the next state, and what happened."""

    state: TrainState
    host: HostState
    proposals: tuple[Proposal, ...]
    readings: tuple[Trajectory, ...]
    groups: tuple[Group, ...]
    examples: tuple[Example, ...]
    row: dict[str, float]


def self_play_step(game: Game, state: TrainState, host: HostState, step: int) -> StepResult:
    """(state, host) -> (state, host), and the record of it. Donates `state`."""
    c, players, time = game.config, game.players, game.timers.measure
    randomness = (c.seed, host.attempt, step)

    # 1 to 6. Questions that passed every check, and those that did not.
    with time("gen/proposer"):
        players.load(state, step)
    asked = ask(game, host.seed_cursor, randomness)

    # 7. The board: rejected places are filled from replay, or stay empty.
    fill = SHORTFALL[c.shortfall.strategy]
    board: Board = fill(asked.proposals, host.replay, stream(randomness, "board"), c.shortfall)

    # 8 to 12. The board is played, paid and learnt from; again where there are mini-epochs.
    round = play_round(game, state, asked, board, randomness, step)
    for again in range(1, c.learner.mini_epochs):
        players.load(round.state, step)
        round = play_round(game, round.state, asked, board, randomness, step, f"/again{again}")

    # 13. What the host remembers.
    board = board.after(round.proposals)
    duplicates = c.shortfall.duplicates
    lasting = board.asked(round.groups) if duplicates else board.new(round.groups)
    replay = after_step(
        remember(host.replay, lasting, step, duplicates=duplicates),
        step,
        clear_every=c.shortfall.clear_every,
        keep=c.shortfall.keep,
        first_clear=c.shortfall.first_clear,
    )
    counts = step_counts(
        proposals=round.proposals,
        discarded=asked.discarded,
        verification=asked.counts,
        board=board,
        groups=round.groups,
        proposer_rewards=round.proposer_rewards,
        solver_rewards=round.solver_rewards,
    )
    return StepResult(
        state=round.state,
        host=dataclasses.replace(host, seed_cursor=asked.cursor, replay=replay),
        proposals=(*round.proposals, *asked.discarded),
        readings=asked.readings,
        groups=round.groups,
        examples=round.examples,
        row={**counts, **round.row, "perf/verify_tokens": tokens_of(asked.readings)},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What the solvers made of a board, and what was learnt from it."""

    state: TrainState
    proposals: tuple[Proposal, ...]
    """Those that came in; the solvers may have outvoted some."""
    groups: tuple[Group, ...]
    proposer_rewards: tuple[Reward, ...]
    solver_rewards: list[tuple[Reward, ...]]
    examples: tuple[Example, ...]
    row: dict[str, float]


def play_round(
    game: Game,
    state: TrainState,
    asked: Asked,
    board: Board,
    randomness: Sequence[object],
    step: int,
    again: str = "",
) -> Round:
    """Steps 8 to 12; `again` is appended to the groups' names. Donates `state`."""
    c, players, time = game.config, game.players, game.timers.measure
    proposals, judge = asked.proposals, game.referee.judge

    # 8. Every question on the board is played by a group of solvers, and 9. judged.
    with time("gen/solver"):
        n = c.solver.group_size
        prompts = [p for q in board.questions for p in [solve(game, q, again)] * n]
        rollouts = players.play(Role.SOLVER, prompts, randomness=randomness)
        greedy = greedy_rewards(game, board, randomness)
    with time("judge"):
        tries = [rollouts[i * n : (i + 1) * n] for i in range(len(board.questions))]
        groups = judge_groups(board.questions, tries, judge)
    refuse_failures(c, step, asked, groups)

    # 10. The last gate: solvers who all miss the answer and agree on another outvote the question.
    if c.verify.consensus:
        proposals = after_solving(proposals, groups)

    # 11. Rewards, and advantages within groups.
    proposer_rewards = reward_proposals(proposals, groups, c.proposer)
    solver_rewards = [reward_rollouts(g, c.solver.rewards) for g in groups]
    played = {
        Role.PROPOSER: Paid([p.trajectory for p in proposals], proposer_rewards),
        Role.SOLVER: Paid(rollouts, [r for group in solver_rewards for r in group]),
    }
    if c.learner.kl_reward:
        played = penalise(game, played)
    examples = {
        Role.PROPOSER: credit(c.proposer, played[Role.PROPOSER]),
        Role.SOLVER: credit(c.solver, played[Role.SOLVER], greedy),
    }

    # 12. Pack and update: both roles, every policy, one compiled program.
    with time("update_actor"):
        state, row = game.trainer.update(state, examples, game.reference, step)
    return Round(
        state=state,
        proposals=proposals,
        groups=groups,
        proposer_rewards=proposer_rewards,
        solver_rewards=solver_rewards,
        examples=(*examples[Role.PROPOSER], *examples[Role.SOLVER]),
        row=row,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What came of a step's seeds."""

    cursor: int
    """Seeds taken so far."""
    proposals: tuple[Proposal, ...]
    """One a place, accepted or rejected."""
    discarded: tuple[Proposal, ...]
    """Those that lost their place to a later try, or found none."""
    readings: tuple[Trajectory, ...]
    counts: VerifyCounts

    @property
    def drafts(self) -> tuple[Trajectory, ...]:
        """What all proposers played, whatever became of it."""
        return tuple(p.trajectory for p in (*self.proposals, *self.discarded))


def ask(game: Game, cursor: int, randomness: Sequence[object]) -> Asked:
    """A batch of proposals; with `resample`, rejected places are tried again with the next seeds.

    The number of a later try is part of its seeds' names, and so of its trajectories' ids.
    """
    c = game.config
    asked = one_try(game, cursor, c.batch, randomness, "")
    tries = c.shortfall.max_attempts if c.shortfall.strategy == "resample" else 1
    for attempt in range(2, tries + 1):
        vacant = sum(not p.accepted for p in asked.proposals)
        if not vacant:
            break
        new = one_try(game, asked.cursor, vacant, randomness, f"/try{attempt}")
        proposals, left = substituted(asked.proposals, new.proposals)
        asked = Asked(
            cursor=new.cursor,
            proposals=proposals,
            discarded=(*asked.discarded, *left),
            readings=(*asked.readings, *new.readings),
            counts=asked.counts + new.counts,
        )
    return asked


def one_try(game: Game, cursor: int, count: int, randomness: Sequence[object], name: str) -> Asked:
    """Steps 1 to 6 for the next `count` seeds; `name` is appended to theirs."""
    c, players, time = game.config, game.players, game.timers.measure

    # 1. Seeds: known answers.
    seeds, cursor = game.seeds.take(cursor, count)
    seeds = [dataclasses.replace(s, uid=s.uid + name) for s in seeds]

    # 2. The proposer searches and asks.
    with time("gen/proposer"):
        prompts = [propose(game, s) for s in seeds for _ in range(c.proposer.group_size)]
        drafts = players.play(Role.PROPOSER, prompts, randomness=randomness)

    # 3. Its question, and 4. the rule filters: cheapest first, one reason.
    proposals = [examined(game, draft) for draft in drafts]

    # 5. Gates: it names what its proposer was shown, in words that the frozen start would use.
    with time("gates"):
        proposals = before_reading(
            proposals,
            c.verify,
            fluency=lambda asked: least_likely(game, asked),
            threshold=game.fluency_threshold,
        )

    # 6. Verification: answerable from the proposer's own evidence, hidden among noise.
    with time("gen/verify"):
        verification = verify(
            proposals,
            c.verify,
            stream=lambda name: stream(randomness, name),
            reader_prompt=lambda q, documents, group: read(game, q, documents, group),
            read=lambda prompts: readings(game, prompts, randomness),
            judge=game.referee.judge,
        )
    return Asked(
        cursor=cursor,
        proposals=verification.proposals,
        discarded=(),
        readings=verification.readings,
        counts=verification.counts,
    )


def readings(
    game: Game, prompts: Sequence[Prompt], randomness: Sequence[object]
) -> tuple[Trajectory, ...]:
    """Step 5's model call: the solver's policy reads, or the judge's model."""
    if game.referee.reader is None:
        return game.players.play(Role.READER, prompts, randomness=randomness)
    return game.referee.reader.read(prompts, randomness=randomness)


def greedy_rewards(game: Game, board: Board, randomness: Sequence[object]) -> list[float | None]:
    """Reward of the solver's most likely answer to each question: the baseline of ReMax."""
    if game.config.solver.estimator != "remax":
        return []
    prompts = [solve(game, q) for q in board.questions]
    rules = game.players.rules(Role.SOLVER, temperature=0.0)
    # A name of their own: a trajectory's id says which group it is compared in.
    prompts = [dataclasses.replace(p, group=f"{p.group}/greedy") for p in prompts]
    rollouts = game.players.play(Role.SOLVER, prompts, randomness=randomness, rules=rules)
    groups = judge_groups(board.questions, [[r] for r in rollouts], game.referee.judge)
    terms = game.config.solver.rewards
    return [reward_rollouts(g, terms)[0].value for g in groups]


class TooManyFailures(UserError, RuntimeError):
    """Tools or judge failed so often that what is left is no sample to learn from."""


def refuse_failures(c: RunConfig, step: int, asked: Asked, groups: Sequence[Group]) -> None:
    """Stops the run when tools or judge fail too often: failures are no outcomes to learn from."""
    verdicts = [x for g in groups for x in g.correct]
    played = len(asked.drafts) + len(asked.readings) + len(verdicts)
    failed = sum(t.failed for t in asked.drafts) + asked.counts.unjudged
    failed += sum(x is None for x in verdicts)
    share = failed / max(1, played)
    if share > c.judge.max_failures:
        raise TooManyFailures(
            f"step {step}: {failed} of {played} rollouts got no tool answer or no "
            f"verdict ({share:.0%}), more than config.judge.max_failures={c.judge.max_failures}; "
            "mend the retriever or the judge and run again, it goes on from the last checkpoint"
        )


def tokens_of(trajectories: Sequence[Trajectory]) -> int:
    """Prompt and response tokens."""
    return sum(len(t.prompt.token_ids) + len(t.token_ids) for t in trajectories)


def propose(game: Game, seed: Seed) -> Prompt:
    """The proposer's prompt about a seed; rollouts of one seed are one group."""
    c = game.config
    return proposer_prompt(
        PROMPTS[c.model.prompts], game.tokenizer, seed, seed.uid, c.proposer.prompt_tokens
    )


def solve(game: Game, question: Question, again: str = "") -> Prompt:
    """The solver's prompt about a question; rollouts of one question are one group."""
    c = game.config
    return solver_prompt(
        PROMPTS[c.model.prompts],
        game.tokenizer,
        question,
        question.uid + again,
        c.solver.prompt_tokens,
    )


def read(game: Game, question: Question, documents: Sequence[Document], group: str) -> Prompt:
    """The reader's prompt, of any length: `verify` holds it to the budget."""
    c = game.config
    # Another model is told in words, whatever marks our own policy was taught to read.
    prompt_set = "ssp" if c.verify.reader == "judge" else c.model.prompts
    prompt = reader_prompt(
        PROMPTS[prompt_set], game.tokenizer, question, documents, group, UNLIMITED
    )
    assert prompt is not None
    return prompt


UNLIMITED = 1 << 40


def least_likely(game: Game, asked: Sequence[Trajectory]) -> list[float]:
    """What the frozen start makes of each question: see `gates.Fluency`."""
    params = game.reference[game.config.proposer.policy]
    return least_logprobs(game.trainer, params, game.tokenizer, asked)


def examined(game: Game, draft: Trajectory) -> Proposal:
    """The question in a trajectory, with the first rule it breaks."""
    c = game.config
    if draft.failed:
        return Proposal(trajectory=draft, question=None, reason=Reason.TOOL_FAILED)
    question = parse_question(draft)
    reason = first_failure(draft, question, c.filters, c.proposer)
    if question is not None and reason is None:
        try:
            solve(game, question)
        except PromptTooLong:
            reason = Reason.TOO_LONG
    return Proposal(trajectory=draft, question=question, reason=reason)


@dataclasses.dataclass(frozen=True)
class Paid:
    """Trajectories of a role and what each is paid, in the order in which they were played."""

    trajectories: Sequence[Trajectory]
    rewards: Sequence[Reward]


def penalise(game: Game, played: Mapping[Role, Paid]) -> dict[Role, Paid]:
    """Rewards less the divergence of their trajectories from the frozen start."""
    found = game.trainer.divergences(
        {role: own.trajectories for role, own in played.items()}, game.reference
    )
    coefficient = game.config.learner.kl_reward
    return {
        role: Paid(own.trajectories, penalised(own.rewards, found[role].tolist(), coefficient))
        for role, own in played.items()
    }


def credit(role: RoleConfig, paid: Paid, greedy: Sequence[float | None] = ()) -> list[Example]:
    """Rewards of groups to examples; what was not paid is left out of statistics and loss."""
    values = [r.value for r in paid.rewards]
    tokens = [int(t.sampled.sum()) for t in paid.trajectories]
    scores = Scores(
        rewards=chunked(values, role.group_size),
        tokens=chunked(tokens, role.group_size),
        greedy=greedy,
    )
    groups = ADVANTAGES[role.estimator](scores, role.std)
    flat = zip(paid.trajectories, paid.rewards, (a for g in groups for a in g), strict=True)
    return [
        Example(trajectory=trajectory, reward=r.value, advantage=a, terms=r.terms)
        for trajectory, r, a in flat
        if r.value is not None and a is not None
    ]


def stream(randomness: Sequence[object], name: str) -> random.Random:
    """A host random stream of its own for everything that is drawn."""
    return random.Random("/".join(map(str, (*randomness, name))))


def chunked(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


# ==================================================================================================
# Build: from a config to the game's collaborators
# ==================================================================================================


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What every command needs of a run: its language, its passages, its policy's shape."""

    config: RunConfig
    workdir: Workdir
    retriever: NamedRetriever
    tokenizer: Tokenizer
    decoder: DecoderConfig
    layout: Layout
    players: Players
    records: bool
    """Whether it is the run itself, and may write into its workdir."""

    @functools.cached_property
    def referee(self) -> Referee:
        """Opened where somebody is judged; asking a question does not need it."""
        return open_referee(self.config, self.workdir.judge, records=self.records)

    @functools.cached_property
    def trainer(self) -> Trainer:
        """Made where the run learns; playing does not need it."""
        return Trainer(self.config, self.decoder, self.layout)

    @property
    def examiner(self) -> Examiner:
        return Examiner(
            config=self.config,
            players=self.players,
            tokenizer=self.tokenizer,
            retriever=self.retriever,
            judge=self.referee.judge,
        )


def build(config: RunConfig, root: str | Path, *, force: bool = False) -> Setup:
    """Makes what the run makes for itself (world, tokenizer), and claims the workdir."""
    workdir = Workdir(Path(root))
    workdir.check(config, force=force)
    recorded = None if force else workdir.decoder()
    decoder = recorded or described(config)
    make_own_world(config, workdir)
    corpus = own_corpus(config, workdir)
    retriever = retrieve(config, corpus)
    workdir.claim(config, decoder, retriever.content, force=force)
    make_own_tokenizer(config, workdir, corpus)
    tokenizer = load_tokenizer(workdir.tokenizer)
    return assemble(config, workdir, decoder, retriever, tokenizer, records=True)


def described(config: RunConfig) -> DecoderConfig:
    """The policy's shape: that of the given weights, or the preset's."""
    if config.model.weights:
        return decoder_config_of(config.model.weights)
    return preset(config.model.preset, config.model.vocab_size)


def assemble(
    config: RunConfig,
    workdir: Workdir,
    decoder: DecoderConfig,
    retriever: NamedRetriever,
    tokenizer: Tokenizer,
    *,
    records: bool = False,
) -> Setup:
    """Players of a policy's shape, with their language and their passages."""
    check_language(config, tokenizer, decoder)
    layout = train_layout(config.mesh)
    return Setup(
        config=config,
        workdir=workdir,
        retriever=retriever,
        tokenizer=tokenizer,
        decoder=decoder,
        layout=layout,
        players=Players(config, decoder, layout, tokenizer, retriever),
        records=records,
    )


def check_language(config: RunConfig, tokenizer: Tokenizer, decoder: DecoderConfig) -> None:
    """What only the tokenizer can tell about the config; raises ConfigError."""
    if tokenizer.vocab_size > decoder.vocab_size:
        raise ConfigError(
            f"config.model.tokenizer={config.model.tokenizer!r}: {tokenizer.vocab_size} entries, "
            f"but the model {config.model.weights or config.model.preset} has "
            f"{decoder.vocab_size} embeddings (model.embed_tokens.weight); choose the model's own "
            "tokenizer"
        )
    smallest = smallest_observation(PROMPTS[config.model.prompts], tokenizer)
    for name, role in (("proposer", config.proposer), ("solver", config.solver)):
        if role.tools and role.observation_tokens < smallest:
            raise ConfigError(
                f"config.{name}.observation_tokens={role.observation_tokens}: a tool's text "
                f"without passages takes {smallest} tokens already; raise it"
            )


def make_own_world(config: RunConfig, workdir: Workdir) -> None:
    """The mini-encyclopaedia of the run's seed, once. `world/made.json`, written last, says how.

    One that was made otherwise is left by a start that failed, and made anew; a run that has begun
    keeps its world whatever `--force` says.
    """
    if config.world.kind == "miniwiki":
        how = {"seed": config.seed, **to_dict(config.world)}
        made = workdir.world / "made.json"
        found = json.loads(made.read_text()) if made.exists() else None
        if found not in (None, how) and workdir.config.exists():
            raise UserError(
                f"{workdir.world} was made with {found}, now asked for {how}; use another --workdir"
            )
        processes.barrier("world seen")
        if found != how and processes.is_main():
            world = make_world(
                config.seed,
                config.world.entities,
                held_out=config.world.held_out,
                hops=config.world.hops,
            )
            write_world(world, workdir.world, count=config.world.questions)
            made.write_text(json.dumps(how) + "\n")
    processes.barrier("world made")


def own_corpus(config: RunConfig, workdir: Workdir) -> Corpus | None:
    """The run's passages: given, or of its own world; None where its retriever alone has them."""
    own = config.retrieval
    if config.world.kind == "none" and not own.corpus:
        return None
    return open_corpus(own.corpus or workdir.world / "corpus.jsonl.gz")


def retrieve(config: RunConfig, corpus: Corpus | None) -> NamedRetriever:
    """What finds the run's passages: an index of them, servers, or a recording."""
    return open_source(config.retrieval, corpus, process=processes.index())


def make_own_tokenizer(config: RunConfig, workdir: Workdir, corpus: Corpus | None) -> None:
    """Saves the run's tokenizer, given or trained on the worlds, once."""
    if not workdir.tokenizer.exists() and processes.is_main():
        given = config.model.tokenizer or config.model.weights
        tokenizer = (
            load_tokenizer(given)
            if given
            else warm_start.train_world_tokenizer(config, list(corpus or ()))
        )
        # The folder appears whole: what is there is never made again.
        unfinished = workdir.tokenizer.with_suffix(".tmp")
        tokenizer.save(unfinished)
        unfinished.rename(workdir.tokenizer)
    processes.barrier("tokenizer saved")


def own_seeds(config: RunConfig, workdir: Workdir) -> SeedSource:
    """The answers the proposer starts from."""
    pool = read_answers(config.seeds.path or workdir.world / "answers.jsonl")
    return SEED_SOURCES[config.seeds.kind](pool, config.seed)


# ==================================================================================================
# The run
# ==================================================================================================


def train(config: RunConfig, root: str | Path, *, force: bool = False) -> None:
    """A whole run in `root`, or the rest of it."""
    processes.initialize()
    console = start_logging(main=processes.is_main())
    learn(build(config, root, force=force), console)


def learn(setup: Setup, console: rich.console.Console) -> None:
    """Warm start if asked for, then self-play to `config.steps`; resumes by itself."""
    config = setup.config
    for caution in cautions(config):
        log.warning(caution)
    seeds = own_seeds(config, setup.workdir)
    check_seeds(setup, seeds)
    setup.referee.check()
    setup.referee.audit(0)
    questions = benchmarks(config, setup.workdir.world) if config.eval.every else {}
    checkpoints = Checkpoints(setup.workdir.checkpoints("self_play"), config.checkpoint.keep)
    with checkpoints, CompileCounter() as compiles:
        state, host, step = start_or_resume(setup, checkpoints, console)
        reference, threshold = own_reference(setup, state)
        game = Game(
            config=config,
            seeds=seeds,
            tokenizer=setup.tokenizer,
            players=setup.players,
            referee=setup.referee,
            trainer=setup.trainer,
            reference=reference,
            fluency_threshold=threshold,
            timers=Timers(),
        )
        self_play(game, setup, state, host, step, questions, checkpoints, compiles, console)
    processes.barrier("done")


def check_seeds(setup: Setup, seeds: SeedSource) -> None:
    """Every seed's prompt fits: said at the start, not on the day when the seed is drawn."""
    c = setup.config
    for seed in seeds.pool:
        proposer_prompt(
            PROMPTS[c.model.prompts], setup.tokenizer, seed, seed.uid, c.proposer.prompt_tokens
        )


def start_or_resume(
    setup: Setup, checkpoints: Checkpoints, console: rich.console.Console
) -> tuple[TrainState, HostState, int]:
    """The last complete checkpoint of self-play, or the state that self-play starts from."""
    latest = checkpoints.latest()
    if latest is not None:
        state, host = checkpoints.restore(latest, setup.trainer.abstract())
        log.info("resumed at step %d", latest)
        return state, host_state_from_json(host), latest
    if setup.config.warm_start.steps:
        state = warm_start.run(setup.config, setup.workdir, setup.trainer, setup.tokenizer, console)
        state = setup.trainer.reset_optimizer(state)
    else:
        state = setup.trainer.start()
    return state, HostState(), 0


def own_reference(setup: Setup, state: TrainState) -> tuple[dict[str, Params], float]:
    """The frozen start of every policy, and the fluency threshold it sets (-inf: none).

    Both are saved once, and nothing is where neither KL nor the gate asks for it. What is kept are
    the demonstrations' numbers, so that another quantile needs no other measurement.
    """
    config, trainer = setup.config, setup.trainer
    if not trainer.needs_reference:
        return {}, -math.inf
    with Checkpoints(setup.workdir.checkpoints("reference"), 1) as saved:
        latest = saved.latest()
        if latest is None:
            reference, known = trainer.reference(state), {}
        else:
            reference, known = saved.restore(latest, trainer.abstract_reference())
        host, quantile = known, config.verify.fluency_quantile
        if quantile > 0 and "fluency" not in known:
            start = reference[config.proposer.policy]
            host = {**known, "fluency": demonstrated(config, trainer, start, setup.tokenizer)}
        if latest is None or host is not known:
            saved.save(0 if latest is None else latest + 1, reference, host)
    if quantile == 0:
        return reference, -math.inf
    threshold = fluency_threshold(host["fluency"], quantile)
    log.info("questions with a token below log-probability %.3f are not fluent", threshold)
    return reference, threshold


def self_play(
    game: Game,
    setup: Setup,
    state: TrainState,
    host: HostState,
    done: int,
    questions: Mapping[str, Sequence[Question]],
    checkpoints: Checkpoints,
    compiles: CompileCounter,
    console: rich.console.Console,
) -> None:
    """Steps `done + 1` to `config.steps`: play, learn, measure, write, checkpoint."""
    c, root, main = game.config, setup.workdir.root, processes.is_main()
    oracle = open_oracle(setup.workdir.world) if c.world.kind == "miniwiki" else None
    writer = MetricsWriter(root, active=main)
    trajectories = TrajectoryWriter(root, active=main)
    fresh = checkpoints.latest() is None
    writer.cut(-1 if fresh else done, host.last_row)
    trajectories.cut(done)
    if fresh:
        row = metrics_row(evaluation(setup, state, 0, questions, c.eval)[0])
        host = dataclasses.replace(host, last_row=row)
        writer.write(0, row)
        checkpoints.save(0, state, host_state_to_json(host))
    progress = Progress("self-play", c.steps, console=console, done=done)
    for step in range(done + 1, c.steps + 1):
        compiles.take()
        with game.timers.measure("step"), kept(checkpoints, step - 1, state, host):
            result = self_play_step(game, state, host, step)
        state = result.state
        row = {**result.row, **truth_metrics(oracle, result.proposals)} if oracle else result.row
        row |= work_metrics(game) | game.referee.take_counts() | game.referee.audit(step)
        if c.eval.every and step % c.eval.every == 0:
            row |= metrics_row(evaluation(setup, state, step, questions, c.eval)[0])
        row["perf/compiles"] = compiles.take()
        if row["perf/compiles"] and step > done + 1:
            log.warning("step %d compiled a program: some shape has changed", step)
        host = dataclasses.replace(result.host, last_row=row)
        checkpoints.poll()
        writer.write(step, row)
        if c.save_trajectories and step % c.save_trajectories == 0:
            trajectories.write(
                step, records(result.proposals, result.groups, result.examples, result.readings)
            )
        if step % c.checkpoint.every == 0 or step == c.steps:
            checkpoints.save(step, state, host_state_to_json(host))
        progress.update(step, row["solver/success_rate"])
    progress.close()
    writer.close()


@contextlib.contextmanager
def kept(checkpoints: Checkpoints, done: int, state: TrainState, host: HostState) -> Iterator[None]:
    """Where the step after `done` is refused, what it started from is saved before the run stops.

    With mini-epochs the state may be gone by then; the last checkpoint is what is left.
    """
    try:
        yield
    except TooManyFailures:
        checkpoints.wait()
        if checkpoints.latest() != done and not state.step.is_deleted():
            checkpoints.save(done, state, host_state_to_json(host))
        raise


def evaluation(
    setup: Setup,
    state: TrainState,
    step: int,
    questions: Mapping[str, Sequence[Question]],
    how: EvalConfig,
    watch: Watch | None = None,
) -> tuple[dict[str, Any], tuple[Group, ...]]:
    """Summary and groups of the state after `step`, with the programs of the rollouts."""
    if not questions:
        return summarise({}), ()
    setup.players.load(state, step)
    summary, groups = examine(
        setup.examiner,
        questions,
        how,
        randomness=(setup.config.seed, "evaluation", step),
        watch=watch,
    )
    setup.players.take_work()
    return summary, groups


def work_metrics(game: Game) -> dict[str, float]:
    """Times and amounts of work of one step, on this process."""
    work = game.players.take_work()
    timings = game.timers.take()
    gen = sum(seconds for name, seconds in timings.items() if name.startswith("timing_s/gen/"))
    counts = work.counts
    return {
        **timings,
        "timing_s/gen": gen,
        "timing_s/retrieval": work.tool_seconds,
        "timing_s/retrieval_exposed": work.exposed_seconds,
        "timing_s/rollout_wait": work.wait_seconds,
        "perf/generated_tokens_per_s": counts.generated / gen if gen else 0.0,
        "perf/generated_tokens": counts.generated,
        "perf/prefill_tokens": counts.prefilled,
        "perf/copied_tokens": counts.copied,
        "perf/decode_slots_busy": counts.generated / counts.slot_steps
        if counts.slot_steps
        else 0.0,
    }


def checking(config: RunConfig) -> RunConfig:
    """The same with `model.check_finite`, which `--check-finite` stands for."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, check_finite=True))


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--config", required=True, help="a Python file with get_config()")
    arguments.add_argument("--workdir", required=True, help="where the run lives")
    arguments.add_argument("--force", action="store_true", help="go on with another config")
    arguments.add_argument("--check-finite", action="store_true", help="refuse weights with a NaN")
    options, overrides = parse(arguments, argv)
    config = load_config(options.config, overrides)
    train(
        checking(config) if options.check_finite else config, options.workdir, force=options.force
    )


if __name__ == "__main__":
    run(main)
