"""What every command shares: `--config=FILE --config.key=value`, and errors on one line.

`--config.key=value` reaches any field of the schema by its dotted name; an unknown key, a wrong
type or an impossible combination ends the command with one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from sspjax.config import ConfigError, RunConfig, check_types, freeze, override
from sspjax.errors import UserError

UNWRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""What the system says of a place that is full, not ours, or no folder."""


def parser(description: str) -> argparse.ArgumentParser:
    """A parser without abbreviations, so that `--config.x` is never taken for another flag."""
    return argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(
    arguments: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, tuple[tuple[str, str], ...]]:
    """Parsed flags, and the `--config.key=value` overrides in the order they were given."""
    overrides, rest, queue = [], [], list(argv)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--config."):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not queue:
                raise ConfigError(f"config.{key}: a value is missing; write --config.{key}=VALUE")
            value = queue.pop(0)
        overrides.append((key, value))
    return arguments.parse_args(rest), tuple(overrides)


def load_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Runs `get_config()` of a Python file, applies the overrides, and freezes the result."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--config={path}: no such file")
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config: ConfigDict = module.get_config()
        check_types(config)
    except (
        AttributeError, KeyError, TypeError, SyntaxError, ImportError, ConfigError
    ) as error:  # fmt: skip
        raise ConfigError(f"--config={path}: {' '.join(str(error).split())}") from error
    for key, value in overrides:
        override(config, key, value)
    return freeze(config)


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Runs a command; an error that the user can mend is one line and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for quiet in ("jax", "orbax", "absl", "httpx"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        sys.stderr.write(f"error: {error}; make room, or name a place that can be written\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run the same command again to go on\n")
        raise SystemExit(130) from None
