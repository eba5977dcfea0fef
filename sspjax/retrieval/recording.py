"""What a retriever answered, in a file, and a retriever that answers from it.

The file is JSON Lines. The first line says what was searched; then each passage once, before the
first result that holds it, and each query once for a number of passages:

    {"format": 1, "content": {"corpus": ..., "index": ...}}
    {"id": ..., "title": ..., "text": ...}
    {"query": ..., "topk": 3, "ids": [...]}      # null where the retriever failed
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sspjax.errors import UserError
from sspjax.retrieval.client import NamedRetriever, Results, RetrievalError, evened
from sspjax.types import Document

FORMAT = 1


class RecordingError(UserError, ValueError):
    """A recording that cannot be read or written, or does not hold what is asked for."""


class RecordingRetriever:
    """Passes queries on and writes down what is new. Threads may share it.

    A recording that exists is continued. What was written by a call is in the file when the call
    returns; half a last line, left by a kill, is cut off.
    """

    def __init__(self, inner: NamedRetriever, path: str | Path) -> None:
        """Raises RecordingError for a file that cannot be continued, or is of another index."""
        self._inner = inner
        self._path = Path(path)
        self._lock = threading.Lock()
        self.content = inner.content
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._known = _continue(self._path, dict(inner.content))
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written ({error})") from None

    def search(self, queries: Sequence[str], topk: int) -> Results:
        try:
            results = self._inner.search(queries, topk)
        except RetrievalError:
            self._write(queries, topk, [None] * len(queries))
            raise
        self._write(queries, topk, results)
        return results

    def _write(self, queries: Sequence[str], topk: int, results: Results) -> None:
        with self._lock:
            lines = list(self._lines(queries, topk, results))
            if lines:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _lines(
        self, queries: Sequence[str], topk: int, results: Results
    ) -> Iterable[dict[str, Any]]:
        documents, known = self._known.documents, self._known.results
        for query, found in zip(map(evened, queries), results, strict=True):
            asked = (query, topk)
            if known.get(asked) is not None or (found is None and asked in known):
                continue
            for document in found or ():
                if document.id not in documents:
                    documents[document.id] = document
                    yield {"id": document.id, "title": document.title, "text": document.text}
            known[asked] = found
            ids = None if found is None else [document.id for document in found]
            yield {"query": query, "topk": topk, "ids": ids}


class ReplayRetriever:
    """Answers what was recorded, with no index and no service."""

    def __init__(self, path: str | Path) -> None:
        """Reads a recording, and those of a run's other processes beside it (`PATH.1`, ...).

        Raises RecordingError for a file that is missing or damaged.
        """
        self._path = Path(path)
        if not self._path.is_file():
            raise RecordingError(f"{path}: no such file; make it with config.retrieval.record")
        self._results: dict[tuple[str, int], tuple[Document, ...] | None] = {}
        contents = []
        for file in of_processes(self._path):
            recorded = _read(file)
            contents.append(recorded.content)
            # One process may have failed where another did not.
            self._results |= {
                asked: found
                for asked, found in recorded.results.items()
                if found is not None or asked not in self._results
            }
        if any(content != contents[0] for content in contents):
            raise RecordingError(f"{path}.*: recordings of several indices; keep those of one run")
        self.content: Mapping[str, str] = contents[0]

    def search(self, queries: Sequence[str], topk: int) -> Results:
        """Raises RecordingError for a query that was not recorded: this is another run then."""
        return [() if not query else self._found(query, topk) for query in map(evened, queries)]

    def _found(self, query: str, topk: int) -> tuple[Document, ...] | None:
        if (query, topk) not in self._results:
            raise RecordingError(
                f"{self._path}: the query {query!r} for {topk} passages was not recorded; replay "
                "the run that was, with its seed and settings, or search an index"
            )
        return self._results[query, topk]


def of_process(path: str | Path, process: int) -> Path:
    """Where a process of a run records: PATH, PATH.1, PATH.2, ..."""
    return Path(path) if process == 0 else Path(f"{path}.{process}")


def of_processes(path: Path) -> list[Path]:
    """All recordings of a run."""
    return [
        path,
        *sorted(p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdecimal()),
    ]


class _Recorded:
    """What a file holds."""

    def __init__(self, content: Mapping[str, str]) -> None:
        self.content = content
        self.documents: dict[str, Document] = {}
        self.results: dict[tuple[str, int], tuple[Document, ...] | None] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """A line after the first; KeyError or TypeError for another one."""
        if "query" not in line:
            self.documents[line["id"]] = Document(**line)
            return
        ids = line["ids"]
        found = None if ids is None else tuple(self.documents[id] for id in ids)
        self.results[line["query"], line["topk"]] = found


def _continue(path: Path, content: Mapping[str, str]) -> _Recorded:
    """What is recorded already, behind a first line about this content."""
    whole = path.read_bytes() if path.exists() else b""
    kept = whole[: whole.rfind(b"\n") + 1]
    if not kept:
        first = {"format": FORMAT, "content": dict(content)}
        path.write_text(json.dumps(first) + "\n", encoding="utf-8")
        return _Recorded(content)
    if len(kept) < len(whole):
        with open(path, "r+b") as file:
            file.truncate(len(kept))
    recorded = _read(path)
    if recorded.content != content:
        raise RecordingError(
            f"{path}: a recording of another index: expected {dict(content)}, found "
            f"{dict(recorded.content)}; name another file in config.retrieval.record"
        )
    return recorded


def _read(path: Path) -> _Recorded:
    """Raises RecordingError naming file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: cannot be read ({error})") from None
    recorded = _Recorded(_read_first(lines[0] if lines else "", path))
    for number, line in enumerate(lines[1:], 2):
        try:
            recorded.take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise _no_recording(path, number, error) from None
    return recorded


def _read_first(line: str, path: Path) -> Mapping[str, str]:
    try:
        first = json.loads(line)
        version, content = first["format"], first["content"]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_recording(path, 1, error) from None
    if version != FORMAT:
        raise RecordingError(f"{path}: expected format {FORMAT}, found {version}; record again")
    return content


def _no_recording(path: Path, line: int, error: Exception) -> RecordingError:
    return RecordingError(
        f"{path}:{line}: expected a line that config.retrieval.record wrote, got something else "
        f"({error!r}); record again"
    )
