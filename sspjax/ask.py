"""One question to a run's agent; its turns are printed as they happen.

    python -m sspjax.ask --workdir=DIR [--step=N|last] [--temperature=0] "question"

Starts with the parameters alone and one slot for each device, so it compiles little and needs
little room. The answer depends on run, step, temperature and question only.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import jax

from sspjax.command_line import parse, parser, run
from sspjax.config import MeshConfig, RunConfig
from sspjax.errors import UserError
from sspjax.metrics import start_logging
from sspjax.reopen import recorded_config, reopen, saved_policies, step_named
from sspjax.rollout.conversation import Watch
from sspjax.rollout.prompts import PROMPTS, solver_prompt
from sspjax.train import Setup
from sspjax.types import Act, Question, Role, Trajectory, Turn


def alone(config: RunConfig) -> RunConfig:
    """The config of the same agent on this process's devices, one slot each."""
    slots = jax.local_device_count()
    return dataclasses.replace(
        config,
        mesh=MeshConfig(),
        rollout=dataclasses.replace(config.rollout, slots=slots, extend_rows=slots),
    )


def ask(setup: Setup, text: str, *, temperature: float, watch: Watch) -> Trajectory:
    """The solver's trajectory about a question; `watch` sees every turn when it is finished.

    Raises PromptTooLong for a question longer than the solver's prompt may be.
    """
    question = Question(uid="asked", text=text, answer="")
    prompt_set, limit = PROMPTS[setup.config.model.prompts], setup.config.solver.prompt_tokens
    prompt = solver_prompt(prompt_set, setup.tokenizer, question, question.uid, limit)
    players, randomness = setup.players, (setup.config.seed, "ask", text)
    rules = players.rules(Role.SOLVER, temperature=temperature)
    return players.play(Role.SOLVER, [prompt], rules=rules, randomness=randomness, watch=watch)[0]


def spoken(turn: Turn) -> str:
    """A turn in one line: what was searched, found (titles), or answered."""
    if not turn.sampled:
        titles = [document.title or document.id for document in turn.documents]
        return f"found: {'; '.join(titles) or 'nothing'}"
    if turn.act is Act.NONE:
        return f"said: {' '.join(turn.text.split())}"
    return f"{turn.act.value}: {turn.argument}"


def ended(trajectory: Trajectory) -> str | None:
    """Why there is no answer, in one line; None where there is one."""
    return None if trajectory.answer is not None else f"no answer: {trajectory.stop.value}"


def say(line: str) -> None:
    """Writes a line to stdout at once, whoever reads it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(setup: Setup, step: int | None, text: str, *, temperature: float) -> None:
    """Asks the policy of a step (None: the last) and says each turn when it is finished."""
    state, found, _ = saved_policies(setup, step)
    setup.players.load(state, found)

    def watch(_uid: str, turn: Turn) -> None:
        say(spoken(turn))

    missing = ended(ask(setup, text, temperature=temperature, watch=watch))
    if missing:
        say(missing)


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--workdir", required=True, help="of the run whose agent is asked")
    arguments.add_argument("--step", default="last", help="checkpoint: a step, or last")
    arguments.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    arguments.add_argument("question")
    options, overrides = parse(arguments, argv)
    if options.temperature < 0:
        raise UserError(f"--temperature={options.temperature}: must be >= 0")
    if not options.question.strip():
        raise UserError("question: expected a text, got nothing")
    start_logging(main=False)
    setup = reopen(alone(recorded_config(options.workdir, overrides)), options.workdir)
    tell(setup, step_named(options.step), options.question, temperature=options.temperature)


if __name__ == "__main__":
    run(main)
