"""Folders that appear whole or not at all: indices, and corpora on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sspjax.errors import UserError


@contextlib.contextmanager
def new_folder(folder: Path, error: type[UserError]) -> Iterator[Path]:
    """A folder to write into, which gets its own name, beside which it lies, when the block ends.

    Nothing is left of it where the block raises. Raises `error` when `folder` exists or cannot be
    written.
    """
    if folder.exists():
        raise error(f"{folder}: exists already; remove it or choose another name")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as reason:
        raise error(f"{folder}: cannot be written ({reason})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
