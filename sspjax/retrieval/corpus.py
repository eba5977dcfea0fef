"""The passages that agents search, in file order: row i of a corpus is row i of its index."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from sspjax.errors import UserError
from sspjax.types import Document, noun


class CorpusError(UserError, ValueError):
    """A corpus that cannot be read. The message is one line and names file and line."""


class Corpus(Protocol):
    """Passages by row, id and title. How they are stored is the implementation's own business."""

    @property
    def content_hash(self) -> str:
        """64 hex digits (SHA-256) over all ids, titles and texts in row order."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Document]:
        """Every passage in row order."""
        ...

    def document(self, row: int) -> Document:
        """The passage at `row`; IndexError outside 0..len-1."""
        ...

    def row(self, id: str) -> int:
        """Row of the passage with this id; KeyError when there is none."""
        ...

    def by_title(self, title: str) -> tuple[Document, ...]:
        """Passages with exactly this title, in row order; long articles have several."""
        ...


class MemoryCorpus:
    """A corpus held as Python objects, for up to a few million passages."""

    def __init__(self, documents: Iterable[Document]) -> None:
        """Raises CorpusError for an empty corpus, a repeated id, or text that is not Unicode."""
        self._documents = tuple(documents)
        if not self._documents:
            raise CorpusError("empty corpus: expected at least one passage")
        self._rows: dict[str, int] = {}
        self._titles: dict[str, list[int]] = {}
        for row, document in enumerate(self._documents):
            first = self._rows.setdefault(document.id, row)
            if first != row:
                raise CorpusError(
                    f"id {document.id!r} is used by passages {first} and {row}: ids must be unique"
                )
            self._titles.setdefault(document.title, []).append(row)
        self.content_hash = content_hash(self._documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def document(self, row: int) -> Document:
        if not 0 <= row < len(self._documents):
            # A negative row is a missing search result, never the last passage.
            raise IndexError(f"row {row}: the corpus has rows 0 to {len(self._documents) - 1}")
        return self._documents[row]

    def row(self, id: str) -> int:
        return self._rows[id]

    def by_title(self, title: str) -> tuple[Document, ...]:
        return tuple(self._documents[row] for row in self._titles.get(title, ()))


class ContentHash:
    """SHA-256 over every id, title and text; each is preceded by its length in bytes."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, document: Document) -> tuple[bytes, bytes, bytes]:
        """Takes the next passage; its id, title and text in UTF-8, CorpusError for half a
        surrogate pair.
        """
        where = f"passage {document.id!r}"
        id, title, text = (
            _encoded(field, where) for field in (document.id, document.title, document.text)
        )
        for field in (id, title, text):
            self._digest.update(len(field).to_bytes(8, "little"))
            self._digest.update(field)
        return id, title, text

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def content_hash(documents: Iterable[Document]) -> str:
    """The `ContentHash` of passages in row order, as 64 hex digits."""
    digest = ContentHash()
    for document in documents:
        digest.add(document)
    return digest.hexdigest()


@noun
class Window:
    """A stretch of the passages that share a title."""

    documents: tuple[Document, ...]
    start: int
    """Place of the first among all of them, from 0."""
    total: int
    """How many there are."""


def window(corpus: Corpus, title: str, *, start: int = 0, count: int) -> Window:
    """`count` passages of an article from place `start` on, fewer at its end; empty for a title
    that the corpus does not have. ValueError for a negative start or a count below 1.
    """
    if start < 0 or count < 1:
        raise ValueError(f"start={start}, count={count}: expected at least 0 and at least 1")
    article = corpus.by_title(title)
    return Window(documents=article[start : start + count], start=start, total=len(article))


def read_corpus(path: str | Path) -> MemoryCorpus:
    """Reads a JSON Lines corpus into memory.

    Raises CorpusError for what `read_documents` does, for a file without passages and for a
    repeated id.
    """
    documents: list[Document] = []
    lines: dict[str, int] = {}
    for number, document in read_documents(path):
        first = lines.setdefault(document.id, number)
        if first != number:
            raise CorpusError(
                f"{path}:{number}: id {document.id!r} is already used on line {first}; "
                "ids must be unique"
            )
        documents.append(document)
    if not documents:
        raise CorpusError(f"{path}: no passages; expected one JSON object a line")
    return MemoryCorpus(documents)


def read_documents(path: str | Path) -> Iterator[tuple[int, Document]]:
    """Line numbers (from 1) and passages of JSON Lines, gzipped when the name ends in .gz.

    A line holds `id, title, text`, or `id, contents` with contents = `"Title"\\ntext` (the layout
    of Search-R1's corpora, whose first line is the title in quotes). Other fields are ignored, and
    so are blank lines. Raises CorpusError for a file that cannot be read, and for a line that is
    not UTF-8, not JSON or lacks a field.
    """
    path = Path(path)
    for number, line in _lines(path):
        yield number, _parse(line, f"{path}:{number}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines (from 1) that are not blank."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise CorpusError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None


def _parse(line: bytes, where: str) -> Document:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: not UTF-8 (byte {error.start}); re-encode the file") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise CorpusError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    if not {"id", "title", "text"} <= fields.keys() and not {"id", "contents"} <= fields.keys():
        found = ", ".join(map(str, fields)) or "nothing"
        raise CorpusError(
            f"{where}: expected id and contents, or id, title and text; found {found}"
        )
    id = fields["id"]
    if type(id) is int:
        id = str(id)
    id = _string(id, "id", where)
    if "text" in fields and "title" in fields:
        title, text = (_string(fields[name], name, where) for name in ("title", "text"))
    else:
        title, text = split_contents(_string(fields["contents"], "contents", where))
    return Document(id=id, title=title, text=text)


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {name} must be a string, got {type(value).__name__}")
    _encoded(value, where)
    return value


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CorpusError(
            f"{where}: {text[:40]!r} holds half a surrogate pair, which no UTF-8 file can store; "
            "repair the text"
        ) from None


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can say and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of `"Title"\\ntext`. A single line without quotes is text alone."""
    first, newline, text = contents.partition("\n")
    quoted = len(first) >= 2 and first[0] == first[-1] == '"'
    if not newline and not quoted:
        return "", contents
    return (first[1:-1] if quoted else first), text


def join_contents(document: Document) -> str:
    """`"Title"\\ntext`, to be split again; a line break in a title becomes a space."""
    return f'"{" ".join(document.title.splitlines())}"\n{document.text}'
