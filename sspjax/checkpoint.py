"""Checkpoints: device state and host state of one step, written together or not at all.

A step is written under a temporary name in the background and renamed when it is complete, so a run
killed at any moment finds its last complete step. Retired steps are renamed out of the way before
their files are removed: what looks like a checkpoint is a whole one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from sspjax import processes
from sspjax.errors import UserError

FORMAT = 1
"""Version of what is inside a checkpoint; raised when older ones can no longer be read."""

_STATE, _HOST = "state", "host"
_RETIRED = ".retired"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written, or is not what the run expects."""


class Checkpoints:
    """The last `keep` checkpoints of one phase, in one folder that every process reaches.

    All processes call the methods in the same order; process 0 writes the host state.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int, *, read_only: bool = False):
        """Removes what an earlier, killed run left half-written.

        With `read_only` nothing in the folder is touched: the way to look at a running run.
        """
        self.folder = epath.Path(os.fspath(folder)).expanduser().resolve()
        self._keep = keep
        self._read_only = read_only
        self._saving: int | None = None
        self._names = ocp.path.step.standard_name_format()
        if not read_only:
            self._remove_retired()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                save_interval_steps=0 if read_only else 1,
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
                todelete_subdir=None if read_only else _RETIRED,
            ),
            handler_registry=_handlers(),
        )

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Copies the state off the devices, then writes in the background.

        The arrays may be donated as soon as this returns. Waits for an earlier save first.

        Args:
          step: a step that is not saved yet.
          state: pytree of jax.Arrays, sharded in any way.
          host: JSON-able; only process 0's is kept.

        Raises:
          CheckpointError: the earlier save or this one failed, or the step exists.
          TypeError: `host` is not JSON-able.
        """
        # A private copy: the file is written after the caller has moved on.
        host = json.loads(json.dumps({"format": FORMAT, "step": step, "host": host}))
        self.wait()
        if self._read_only:
            raise CheckpointError(f"{self.folder}: opened read-only, cannot save step {step}")
        if step in self._found():
            raise CheckpointError(
                f"{self.folder}: step {step} is already saved; after a roll-back call drop_after"
            )
        self._saving = step
        with self._told():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{_STATE: ocp.args.StandardSave(state), _HOST: ocp.args.JsonSave(host)}
                ),
                force=True,
            )

    def poll(self) -> None:
        """Raises CheckpointError if a background save has failed; never waits for one."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written; raises CheckpointError if a save has failed."""
        if self._saving is None:
            return
        with self._told():
            self._manager.wait_until_finished()
        self._saving = None
        self._remove_retired()

    def steps(self) -> list[int]:
        """Complete checkpoints as process 0 sees them, oldest first."""
        return json.loads(processes.exchange(json.dumps(self._found()).encode())[0])

    def latest(self) -> int | None:
        """Last complete checkpoint, or None where the phase starts from nothing."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(
        self, step: int, abstract_state: Any, *, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Reads one checkpoint, bit for bit, onto any mesh.

        Args:
          step: one of `steps()`.
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings; the result has its form.
          partial: read only what `abstract_state` names (parameters without their optimizer);
            otherwise anything it leaves out is an error.

        Returns:
          The state and the host dict that were saved together.

        Raises:
          CheckpointError: no such step, another format, or other paths, shapes or dtypes.
        """
        if step not in self.steps():
            raise CheckpointError(
                f"{self.folder}: no complete checkpoint of step {step}; there are {self.steps()}"
            )
        found = self._manager.restore(
            step, args=ocp.args.Composite(**{_HOST: ocp.args.JsonRestore()})
        )[_HOST]
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"{self.folder}: step {step} has format {found['format']}, this version reads "
                f"{FORMAT}; use the version that wrote it"
            )
        # Matched by path, so that the saved tree decides how its containers are written.
        saved = self._manager.item_metadata(step)[_STATE].tree
        wanted, form = _by_path(abstract_state)
        self._compare(step, _by_path(saved)[0], wanted, partial=partial)
        request = jax.tree_util.tree_map_with_path(
            lambda path, _: wanted.get(_dotted(path), ocp.PLACEHOLDER), saved
        )
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.PyTreeRestore(
                        request,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(request),
                    )
                }
            ),
        )[_STATE]
        leaves = _by_path(read)[0]
        return jax.tree.unflatten(form, [leaves[path] for path in wanted]), found["host"]

    def drop_after(self, step: int) -> None:
        """Removes every later checkpoint, newest first, so that a rolled-back run continues here.

        Killed half-way it leaves the older ones of them: the roll-back is then decided again.
        """
        self.wait()
        for later in reversed([s for s in self.steps() if s > step]):
            self._manager.delete(later)
        self._remove_retired()

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _found(self) -> list[int]:
        """Complete steps on disk; the manager's own list counts what it is still writing."""
        if not self.folder.exists():
            return []
        return sorted(found.step for found in self._names.find_all(self.folder))

    def _remove_retired(self) -> None:
        retired = self.folder / _RETIRED
        if processes.is_main() and retired.exists():
            retired.rmtree()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what the storage layers raise into an error that says what is still good."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            failed, self._saving = self._saving, None
            self._manager.reload()  # It had already struck out what the failed save would retire.
            good = max(self._found(), default=None)
            rest = (
                "there is no complete checkpoint yet"
                if good is None
                else f"the last complete checkpoint, step {good}, is untouched"
            )
            raise CheckpointError(
                f"{self.folder}: saving step {failed} failed: {error}; {rest}; "
                "make room or mend the disk, then run again to resume"
            ) from error

    def _compare(
        self, step: int, saved: dict[str, Any], wanted: dict[str, Any], *, partial: bool
    ) -> None:
        """Orbax converts dtypes silently and stops at the first shape: compare before reading."""
        paths = wanted if partial else wanted | saved
        pairs = [(path, _kind(wanted.get(path)), _kind(saved.get(path))) for path in paths]
        wrong = [f"{path}: expected {a}, saved {b}" for path, a, b in pairs if a != b]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"{self.folder}: step {step} does not fit this run's model or optimizer; "
                f"{'; '.join(wrong[:5])}{more}; use the config it was written with"
            )


def _by_path(tree: Any) -> tuple[dict[str, Any], Any]:
    """Leaves under their dotted paths, in order, and the form they came in."""
    leaves, form = jax.tree_util.tree_flatten_with_path(tree)
    return {_dotted(path): leaf for path, leaf in leaves}, form


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _kind(leaf: Any) -> str:
    """Type of a leaf, such as `float32[8,4]`."""
    return "nothing" if leaf is None else f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """What reads and writes each item, known before the first save."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    standard, tree, text = (
        ocp.StandardCheckpointHandler(),
        ocp.PyTreeCheckpointHandler(),
        ocp.JsonCheckpointHandler(),
    )
    registry.add(_STATE, ocp.args.StandardSave, standard)
    registry.add(_STATE, ocp.args.PyTreeRestore, tree)
    registry.add(_HOST, ocp.args.JsonSave, text)
    registry.add(_HOST, ocp.args.JsonRestore, text)
    return registry
