"""A corpus on disk, mapped into memory: its text stays in the file until somebody asks for it.

A store is a folder:

    meta.json      format, passages, content hash, size of every file
    passages.bin   each passage after the other: u32 bytes of its id, u32 bytes of its title, then
                   id, title and text in UTF-8
    starts.npy     u64[passages + 1]: where each begins
    ids.npy        u32[2^n]: hash table of ids, open addressing; row + 1, 0 where nothing is
    titles.npy     u32[2^n]: the same of titles, with the first row of each
    next.npy       u32[passages]: the next row of the same title, plus 1; 0 at the last
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from sspjax.retrieval.corpus import ContentHash, Corpus, CorpusError, read_corpus, read_documents
from sspjax.retrieval.folders import new_folder
from sspjax.types import Document

FORMAT = 1
HEADER = struct.Struct("<II")
TABLES = ("starts", "ids", "titles", "next")
MOST_PASSAGES = 2**32 - 2


class StoredCorpus:
    """The passages of a store. A passage, a row by id and a title's first row are each found in a
    time that does not grow with the corpus; nothing is read before it is asked for.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises CorpusError for a folder that is no store, or a damaged one."""
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        self.content_hash: str = meta["content_hash"]
        self._passages: int = meta["passages"]
        try:
            with open(self.folder / "passages.bin", "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._starts, self._ids, self._titles, self._next = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in TABLES
            )
        except (OSError, ValueError) as error:
            raise CorpusError(f"{self.folder}: cannot be read ({error}); {AGAIN}") from None

    def __len__(self) -> int:
        return self._passages

    def __iter__(self) -> Iterator[Document]:
        return (self.document(row) for row in range(len(self)))

    def document(self, row: int) -> Document:
        if not 0 <= row < len(self):
            # A negative row is a missing search result, never the last passage.
            raise IndexError(f"row {row}: the corpus has rows 0 to {len(self) - 1}")
        id, title, text = self._fields(row)
        return Document(id=id.decode(), title=title.decode(), text=text.decode())

    def row(self, id: str) -> int:
        key = id.encode(errors="replace")
        for row in _candidates(self._ids, key):
            if self._fields(row)[0] == key:
                return row
        raise KeyError(id)

    def by_title(self, title: str) -> tuple[Document, ...]:
        key = title.encode(errors="replace")
        # Rows are chained by the hash of their titles, which other titles might share.
        row = next(
            (
                first
                for first in _candidates(self._titles, key)
                if _hashed(self._fields(first)[1]) == _hashed(key)
            ),
            -1,
        )
        found = []
        while row >= 0:
            document = self.document(row)
            found += [document] if document.title == title else []
            row = int(self._next[row]) - 1
        return tuple(found)

    def _fields(self, row: int) -> tuple[bytes, bytes, bytes]:
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        of_id, of_title = HEADER.unpack_from(self._bytes, start)
        title = start + HEADER.size + of_id
        text = title + of_title
        return (
            self._bytes[start + HEADER.size : title],
            self._bytes[title:text],
            self._bytes[text:end],
        )


def open_corpus(path: str | Path) -> Corpus:
    """A store's folder, mapped, or a JSON Lines file, read into memory; raises CorpusError."""
    return StoredCorpus(path) if Path(path).is_dir() else read_corpus(path)


def write_store(source: str | Path, folder: str | Path) -> StoredCorpus:
    """Makes a store of a JSON Lines corpus (`read_documents`), whole or not at all.

    Some 100 bytes a passage are held while it is made, whatever its text. Raises CorpusError for a
    corpus that cannot be read or is empty, for a repeated id, and for a folder that exists or
    cannot be written.
    """
    with new_folder(Path(folder), CorpusError) as partial:
        _write(partial, source, read_documents(source))
    return StoredCorpus(folder)


def _write(folder: Path, source: str | Path, documents: Iterable[tuple[int, Document]]) -> None:
    digest = ContentHash()
    sizes, lines, ids, titles = _Column(), _Column(), _Column(), _Column()
    with open(folder / "passages.bin", "wb") as file:
        for line, document in documents:
            id, title, text = digest.add(document)
            size = file.write(HEADER.pack(len(id), len(title)) + id + title + text)
            for column, value in (
                (sizes, size),
                (lines, line),
                (ids, _hashed(id)),
                (titles, _hashed(title)),
            ):
                column.append(value)
    count = len(sizes)
    if not 0 < count <= MOST_PASSAGES:
        raise CorpusError(f"{source}: {count} passages; expected 1 to {MOST_PASSAGES}")
    starts = np.zeros(count + 1, np.uint64)
    np.cumsum(sizes.array(), out=starts[1:])
    np.save(folder / "starts.npy", starts)
    id_hashes = ids.array()
    _refuse_repeated(folder, source, starts, id_hashes, lines.array())
    np.save(folder / "ids.npy", _table(id_hashes, np.arange(count)))
    firsts, following = _chained(titles.array())
    np.save(folder / "titles.npy", _table(titles.array()[firsts], firsts))
    np.save(folder / "next.npy", following)
    meta = {
        "format": FORMAT,
        "passages": count,
        "content_hash": digest.hexdigest(),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


class _Column:
    """u64 numbers appended one by one, in blocks rather than as objects."""

    BLOCK = 1 << 16

    def __init__(self) -> None:
        self._full: list[np.ndarray] = []
        self._last: list[int] = []

    def append(self, value: int) -> None:
        self._last.append(value)
        if len(self._last) == self.BLOCK:
            self._full.append(np.array(self._last, np.uint64))
            self._last = []

    def __len__(self) -> int:
        return len(self._full) * self.BLOCK + len(self._last)

    def array(self) -> np.ndarray:
        return np.concatenate([*self._full, np.array(self._last, np.uint64)])


def _refuse_repeated(
    folder: Path, source: str | Path, starts: np.ndarray, hashes: np.ndarray, lines: np.ndarray
) -> None:
    """Raises CorpusError for the first pair of passages, by hash, that have one id."""
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    with open(folder / "passages.bin", "rb") as file:
        for place in same.tolist():
            first, second = order[place : place + 2].tolist()
            one, other = (_id_at(file, int(starts[row])) for row in (first, second))
            if one == other:
                raise CorpusError(
                    f"{source}:{lines[second]}: id {one.decode()!r} is already used on line "
                    f"{lines[first]}; ids must be unique"
                )


def _id_at(file, start: int) -> bytes:
    file.seek(start)
    length, _ = HEADER.unpack(file.read(HEADER.size))
    return file.read(length)


def _hashed(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _table(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """u32[2^n], at most half full: `rows` + 1, each in the first free slot from its hash on."""
    capacity = 1 << (2 * len(hashes) - 1).bit_length()
    mask = np.uint64(capacity - 1)
    table = np.zeros(capacity, np.uint32)
    values = (rows + 1).astype(np.uint32)
    slots = hashes & mask
    waiting = np.arange(len(hashes))
    while len(waiting):
        # All that find their slot free write into it; the one whose write is left has it.
        free = waiting[table[slots[waiting]] == 0]
        table[slots[free]] = values[free]
        waiting = waiting[table[slots[waiting]] != values[waiting]]
        slots[waiting] = (slots[waiting] + np.uint64(1)) & mask
    return table


def _chained(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First rows of all different hashes, and u32[rows]: the next row of the same one, plus 1."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    new = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    following = np.zeros(len(hashes), np.uint32)
    following[order[:-1]] = np.where(new[1:], 0, order[1:] + 1)
    return order[new], following


def _candidates(table: np.ndarray, key: bytes) -> Iterator[int]:
    """Rows whose key may be this one."""
    mask = len(table) - 1
    slot = _hashed(key) & mask
    while table[slot]:
        yield int(table[slot]) - 1
        slot = (slot + 1) & mask


AGAIN = "make it again with `python -m retrieval_index.store`"


def _read_meta(folder: Path) -> dict:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise CorpusError(
            f"{path}: no such file; expected a folder made by `python -m retrieval_index.store`, "
            "or a JSON Lines file"
        ) from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read ({error}); {AGAIN}") from None
    if not isinstance(meta, dict) or not {"passages", "content_hash", "files"} <= meta.keys():
        raise CorpusError(f"{path}: not the meta.json of a store; {AGAIN}")
    if meta.get("format") != FORMAT:
        raise CorpusError(f"{path}: expected format {FORMAT}, found {meta.get('format')}; {AGAIN}")
    for name, size in meta["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else "no file"
        if found != size:
            raise CorpusError(f"{file}: expected {size} bytes, found {found}; {AGAIN}")
    return meta
