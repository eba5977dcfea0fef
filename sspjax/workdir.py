"""The workdir: what a run was started with, and what it may be resumed with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sspjax import __version__, processes
from sspjax.config import RunConfig, config_hash, to_dict
from sspjax.errors import UserError
from sspjax.models.presets import DecoderConfig, decoder_from_json

FREE = frozenset(
    {"steps", "checkpoint", "eval", "save_trajectories", "mesh", "rollout", "model.check_finite"}
    | {f"retrieval.{name}" for name in ("url", "batch", "timeout", "retries", "deadline")}
    | {f"retrieval.{name}" for name in ("record", "replay")}
    | {"judge.url", "judge.api_key_variable", "judge.concurrency", "judge.timeout"}
    | {"judge.tries", "judge.backoff", "judge.max_failures"}
    | {"judge.audit_every", "judge.audit_floor"}
)
"""Groups and keys that may change from start to start: none changes what a step samples."""


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run's files."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def world(self) -> Path:
        return self.root / "world"

    @property
    def judge(self) -> Path:
        """Folder of the judge's journals."""
        return self.root / "judge"

    def checkpoints(self, phase: str) -> Path:
        """Folder of a phase: `warm_start`, `self_play` or `reference`."""
        return self.root / "checkpoints" / phase

    def decoder(self) -> DecoderConfig | None:
        """The policy's shape as `claim` recorded it; None where it did not."""
        found = json.loads(self.config.read_text()) if self.config.exists() else {}
        return decoder_from_json(found["decoder"]) if "decoder" in found else None

    def claim(
        self,
        config: RunConfig,
        decoder: DecoderConfig,
        content: Mapping[str, str],
        *,
        force: bool,
    ) -> None:
        """Records config, the policy's shape and content hashes (corpus, index); refuses a workdir
        of another run.

        Raises UserError naming what differs; `force` records the new values instead.
        """
        new = {
            "version": __version__,
            "config": to_dict(config),
            "config_hash": config_hash(config),
            "decoder": dataclasses.asdict(decoder),
            "content": dict(content),
        }
        self.check(config, content, force=force)
        processes.barrier("workdir read")
        if processes.is_main():
            self.root.mkdir(parents=True, exist_ok=True)
            temporary = self.config.with_suffix(".tmp")
            temporary.write_text(json.dumps(new, indent=2) + "\n")
            temporary.replace(self.config)
        processes.barrier("workdir claimed")

    def check(
        self, config: RunConfig, content: Mapping[str, str] | None = None, *, force: bool
    ) -> None:
        """Refuses what `claim` would, writing nothing; without `content` by the config alone."""
        if force or not self.config.exists():
            return
        old, new = json.loads(self.config.read_text()), json.loads(json.dumps(to_dict(config)))
        found = [
            f"config.{key} is {then!r} there and {now!r} now"
            for key, then, now in _differences(old["config"], new)
            if not FREE & {key, key.split(".")[0]}
        ]
        if content is not None:
            found += [
                f"{key} is {then} there and {now} now"
                for key, then, now in _differences(old["content"], dict(content))
            ]
        if found:
            more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
            raise UserError(
                f"{self.root} belongs to another run: {'; '.join(found[:4])}{more}; use another "
                "--workdir, the old values, or --force to go on with the new ones"
            )


def read_config(workdir: str | Path) -> dict[str, Any]:
    """The config a workdir was started with, as plain dicts; UserError where there is none."""
    return read_record(workdir)["config"]


def read_record(workdir: str | Path) -> dict[str, Any]:
    """All that `claim` recorded: version, config and its hash, decoder, content hashes."""
    path = Workdir(Path(workdir)).config
    if not path.exists():
        raise UserError(f"{path}: no such file; {workdir} is not the workdir of a run")
    return json.loads(path.read_text())


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [(prefix, old, new)]
    return [
        difference
        for key in sorted({*old, *new})
        for difference in _differences(
            old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key
        )
    ]
