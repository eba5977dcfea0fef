"""A run's policy as a Hugging Face model folder, which transformers and servers of it load.

    python -m sspjax.export --workdir=DIR --out=HF_DIR [--step=N|last] [--policy=NAME]
        [--dtype=bfloat16|float32] [--verify]

Writes safetensors, config.json, generation_config.json, tokenizer and model card, in the dtype
that the policy played in unless another is asked for. --verify loads the folder with transformers
and compares logits (needs the extra `parity`). The folder appears when it is complete.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sspjax import __version__, processes
from sspjax.command_line import parse, parser, run
from sspjax.config import RunConfig
from sspjax.errors import UserError
from sspjax.mesh import train_layout
from sspjax.metrics import start_logging
from sspjax.models.hugging_face.save import NAMES, save_config, save_params
from sspjax.models.hugging_face.verify import LIMIT, compare_with_transformers, require_torch
from sspjax.reopen import own_decoder, read_policies, recorded_config, step_named
from sspjax.rollout.tokenizer import Tokenizer, load_tokenizer
from sspjax.workdir import Workdir, read_record

log = logging.getLogger(__name__)


def export(
    config: RunConfig,
    root: str | Path,
    step: int | None,
    out: Path,
    *,
    policy: str | None = None,
    dtype: str | None = None,
    verify: bool = False,
) -> None:
    """Writes the folder `out`.

    Raises UserError where `out` exists, where there is no such step or policy, and where `verify`
    finds other logits than transformers'.
    """
    if verify:
        require_torch("--verify")
    processes.initialize()
    start_logging(main=processes.is_main())
    if out.exists():
        raise UserError(f"--out={out}: exists; expected the name of a folder to make")
    workdir, dtype = Workdir(Path(root)), dtype or config.model.dtype
    decoder, layout = own_decoder(config, workdir), train_layout(config.mesh)
    tokenizer = load_tokenizer(workdir.tokenizer)
    state, found, folder = read_policies(config, workdir, decoder, layout, step)
    name = chosen_policy(list(state.policies), policy)
    log.info("exporting %s of %s as %s", name, folder, dtype)
    # Beside its place, so that it gets there by a rename.
    unfinished = out.with_name(f".{out.name}.unfinished")
    if processes.is_main():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    save_params(unfinished, decoder, state.policies[name].params, dtype)
    if processes.is_main():
        save_config(unfinished, decoder, dtype, token_ids(tokenizer))
        tokenizer.save(unfinished)
        card = model_card(config, read_record(root), out.name, name, found, dtype)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    processes.barrier("exported")
    if verify:
        result = compare_with_transformers(unfinished, layout)
        log.info(
            "transformers: logits differ by at most %.2g (largest %.3g), same best token at %.1f%%",
            result.difference,
            result.largest,
            100 * result.same_best,
        )
        if not result.passed:
            raise UserError(
                f"--verify: logits of {unfinished} differ by {result.difference:.3g} from those of "
                f"transformers, expected at most {LIMIT * result.largest:.3g}; the folder is left "
                "there to look at"
            )
    if processes.is_main():
        unfinished.rename(out)
    processes.barrier("named")
    log.info("wrote %s", out)


def chosen_policy(names: Sequence[str], wish: str | None) -> str:
    """The policy that is asked for, or the only one."""
    chosen = names[0] if wish is None and len(names) == 1 else wish
    if chosen is None or chosen not in names:
        raise UserError(f"--policy={wish or ''}: expected one of {', '.join(names)}")
    return chosen


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """What begins, ends and pads a text."""
    begin = {"bos_token_id": tokenizer.opening_ids[0]} if tokenizer.opening_ids else {}
    return {**begin, "eos_token_id": list(tokenizer.end_ids), "pad_token_id": tokenizer.pad_id}


def base_model(weights: str) -> str:
    """Name of the model that a folder holds: of a hub's cache, `owner/name`; else the folder's."""
    for part in reversed(Path(weights).parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return Path(weights).resolve().name


def model_card(
    config: RunConfig, record: Mapping[str, Any], title: str, policy: str, step: int, dtype: str
) -> str:
    """README.md of the folder: what it was made from, with which data and which settings."""
    base = base_model(config.model.weights) if config.model.weights else ""
    world = config.world
    made_up = f"made-up encyclopaedia of {world.entities} entities, seed {config.seed}"
    rows = {
        "base model": base or f"none: random parameters of the shape `{config.model.preset}`",
        "passages": Path(config.retrieval.corpus).name or made_up,
        "passages, hash": record["content"]["corpus"],
        "answers asked about": Path(config.seeds.path).name or made_up,
        "warm start": f"{config.warm_start.steps} steps",
        "self-play": f"{step} steps, policy `{policy}`",
        "prompts": f"`{config.model.prompts}`",
        "config hash": record["config_hash"],
        "made with": f"sspjax {record['version']}, exported as {dtype} with {__version__}",
    }
    front = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if "/" in base else []),
        "tags: [search-agent, self-play]",
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
{chr(10).join(front)}
---

# {title}

A search agent trained by search self-play: it asks itself questions about a corpus, and answers
them by searching. It expects its own prompt layout and a search tool; without them it is not the
agent that was trained.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```
"""


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--workdir", required=True, help="of the run whose policy is written")
    arguments.add_argument("--out", required=True, help="folder to make")
    arguments.add_argument("--step", default="last", help="checkpoint: a step, or last")
    arguments.add_argument("--policy", help="where roles have policies of their own")
    arguments.add_argument("--dtype", choices=tuple(NAMES), help="default: the run's")
    arguments.add_argument("--verify", action="store_true", help="compare with transformers")
    options, overrides = parse(arguments, argv)
    export(
        recorded_config(options.workdir, overrides),
        options.workdir,
        step_named(options.step),
        Path(options.out),
        policy=options.policy,
        dtype=options.dtype,
        verify=options.verify,
    )


if __name__ == "__main__":
    run(main)
