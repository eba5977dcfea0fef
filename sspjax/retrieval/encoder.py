"""Queries and passages as unit vectors, whose dot product is the score of a search.

`HashedTfidf` is the encoder that needs no model: BM25, written as a dot product of unit vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from sspjax.errors import UserError
from sspjax.retrieval.corpus import Corpus
from sspjax.types import Document, record

PASSAGES_PER_CALL = 512
"""Passages encoded at a time: 16 MB of vectors at 8,192 dimensions."""


class EncoderError(UserError, ValueError):
    """An encoder that is unknown, or whose saved state cannot be read."""


class Encoder(Protocol):
    """Maps text to unit vectors, the same text to the same bits."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    def config(self) -> dict[str, Any]:
        """What determines the vectors, JSON-able; an index made under another one is refused."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """f32[queries, dimensions], rows of length 1; zeros where it knows no word of a query."""
        ...

    def encode_passages(self, documents: Sequence[Document]) -> np.ndarray:
        """f32[documents, dimensions], rows of length 1."""
        ...

    def save(self, folder: Path) -> None:
        """Writes `encoder.json`, which names the encoder, and whatever else `load` needs."""
        ...


class EncoderKind(Protocol):
    """How the encoders of one name come to be."""

    def fit(self, corpus: Corpus) -> Encoder:
        """An encoder for this corpus; one that is trained already ignores it."""
        ...

    def load(self, folder: Path) -> Encoder:
        """The encoder that `save` wrote; EncoderError when its files are missing or damaged."""
        ...


def encode_corpus(encoder: Encoder, documents: Iterable[Document]) -> Iterator[np.ndarray]:
    """f32[at most PASSAGES_PER_CALL, dimensions], one stretch of the passages after the other."""
    return (encoder.encode_passages(stretch) for stretch in _stretches(documents))


def _stretches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    stretch: list[Document] = []
    for document in documents:
        stretch.append(document)
        if len(stretch) == PASSAGES_PER_CALL:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


@record
class HashedTfidf:
    """BM25 over hashed words, as a cosine.

    A passage gives each of its words the weight tf (k1 + 1) / (tf + k1 (1 - b + b length / mean)),
    a query gives it tf * idf with idf = ln(1 + (N - df + 1/2) / (df + 1/2)), and BM25 is their dot
    product (Robertson and Zaragoza 2009, section 3.2; k1 = 0.9 and b = 0.4 are the usual choice
    for Wikipedia passages). Dividing a passage by its own length would change the order of
    results; instead all passages are divided by the longest one and filled up to length 1 in the
    last dimension, where queries are 0. So the cosine *is* BM25 up to a factor for each query.

    Words are folded (case, accents) and hashed to 64-bit keys. The title counts `title_weight`
    times, and a whole title is a word of its own, asked for by a query that is exactly that title
    (with the weight of as many words as it has): an entity's name finds the entity's passage, not
    one that repeats parts of the name.

    A word lives in one or two of the dimensions: it takes the least used of its hashed places,
    the most frequent words first, and a second one where it does not have the first to itself, so
    that words which meet in one place part in the other. A word that no passage holds is ignored.
    """

    words: np.ndarray
    """u64[vocabulary]: keys of the known words, ascending."""
    places: np.ndarray
    """i32[vocabulary, 2]: dimensions of each word; -1: no second one."""
    idf: np.ndarray
    """f32[vocabulary]"""
    mean_length: float
    """Words of a passage, on average."""
    longest: float
    """Largest Euclidean length of a passage's weights."""
    dimensions: int
    k1: float
    b: float
    title_weight: int

    @property
    def name(self) -> str:
        return "tfidf"

    @classmethod
    def fit(
        cls,
        corpus: Corpus,
        *,
        dimensions: int = 8192,
        k1: float = 0.9,
        b: float = 0.4,
        title_weight: int = 2,
    ) -> Self:
        """Counts the words of the corpus and places them; EncoderError where it has none.

        8,192 dimensions give each word of a small corpus a place of its own, and rank 9,302
        Wikipedia passages with 58,638 different words as well as a dimension for each word does.
        """
        if dimensions < 64:
            raise ValueError(f"dimensions={dimensions}: expected at least 64")
        frequency: Counter[int] = Counter()
        length = 0
        for document in corpus:
            counts = _passage_counts(document, title_weight)
            frequency.update(counts.words.keys())
            length += counts.length
        if not frequency:
            raise EncoderError(
                f"expected passages with words, found none in {len(corpus)} passages"
            )
        words = sorted(frequency)
        df = np.array([frequency[word] for word in words], np.float64)
        unscaled = cls(
            words=np.array(words, np.uint64),
            places=_place(frequency, dimensions - 1),
            idf=np.log1p((len(corpus) - df + 0.5) / (df + 0.5)).astype(np.float32),
            mean_length=length / len(corpus),
            longest=1.0,  # Of no effect on the weights it is taken from.
            dimensions=dimensions,
            k1=k1,
            b=b,
            title_weight=title_weight,
        )
        lengths = (unscaled._weigh(stretch).lengths for stretch in _stretches(corpus))
        return dataclasses.replace(unscaled, longest=max(float(some.max()) for some in lengths))

    def config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dimensions": self.dimensions,
            "k1": self.k1,
            "b": self.b,
            "title_weight": self.title_weight,
            "state": self._state_hash(),
        }

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        words, rows, tf = self._known([_query_counts(query) for query in queries])
        weights = self._spread(words, rows, tf * self.idf[words], len(queries))
        lengths = weights.lengths
        return weights.vectors(np.where(lengths > 0, lengths, 1.0))

    def encode_passages(self, documents: Sequence[Document]) -> np.ndarray:
        weights = self._weigh(documents)
        lengths = weights.lengths
        # A passage of another corpus may be longer than the longest of this one.
        scale = np.maximum(lengths, self.longest)
        vectors = weights.vectors(scale)
        vectors[:, -1] = np.sqrt(1.0 - (lengths / scale) ** 2)
        return vectors

    def save(self, folder: Path) -> None:
        np.savez(
            folder / "encoder.npz",
            words=self.words,
            places=self.places,
            idf=self.idf,
            mean_length=np.float64(self.mean_length),
            longest=np.float64(self.longest),
        )
        (folder / "encoder.json").write_text(json.dumps(self.config(), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        config = read_config(folder)
        path = folder / "encoder.npz"
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as state:
                encoder = cls(
                    words=state["words"],
                    places=state["places"],
                    idf=state["idf"],
                    mean_length=float(state["mean_length"]),
                    longest=float(state["longest"]),
                    dimensions=config["dimensions"],
                    k1=config["k1"],
                    b=config["b"],
                    title_weight=config["title_weight"],
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise EncoderError(f"{path}: cannot be read ({error}); build the index again") from None
        if encoder.config() != dict(config):
            raise EncoderError(
                f"{path}: expected the state {config.get('state')}, got {encoder._state_hash()}; "
                "the file was changed or belongs to another index: build the index again"
            )
        return encoder

    def _weigh(self, documents: Sequence[Document]) -> _Weights:
        """BM25's passage weights, the last dimension empty."""
        counts = [_passage_counts(document, self.title_weight) for document in documents]
        words, rows, tf = self._known(counts)
        lengths = np.array([count.length for count in counts], np.float64)
        damping = self.k1 * (1 - self.b + self.b * lengths / self.mean_length)
        return self._spread(words, rows, tf * (self.k1 + 1) / (tf + damping[rows]), len(counts))

    def _known(self, counts: Sequence[_Counts]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position in the vocabulary, row and count of every known word: i64, i64, f64."""
        keys = np.array([word for count in counts for word in count.words], np.uint64)
        tf = np.array([n for count in counts for n in count.words.values()], np.float64)
        rows = np.repeat(np.arange(len(counts)), [len(count.words) for count in counts])
        words = np.minimum(np.searchsorted(self.words, keys), len(self.words) - 1)
        known = self.words[words] == keys
        return words[known], rows[known], tf[known]

    def _spread(
        self, words: np.ndarray, rows: np.ndarray, weights: np.ndarray, count: int
    ) -> _Weights:
        """Each word's weight in its places; words that meet in one add up."""
        places = self.places[words]
        # Both sides of a dot product are spread, so two places take a root of a half each.
        share = np.where(places[:, 1] < 0, 1.0, 0.5**0.5)
        used = places >= 0
        flat = (rows[:, None] * self.dimensions + places)[used]
        cells, where = np.unique(flat, return_inverse=True)
        values = np.bincount(where, np.broadcast_to((weights * share)[:, None], used.shape)[used])
        return _Weights(shape=(count, self.dimensions), cells=cells, values=values)

    def _state_hash(self) -> str:
        digest = hashlib.sha256()
        for array in (self.words, self.places, self.idf):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(np.array([self.mean_length, self.longest], np.float64).tobytes())
        return digest.hexdigest()[:16]


def read_config(folder: Path) -> Mapping[str, Any]:
    """Content of an index folder's encoder.json; EncoderError when it cannot be read."""
    path = folder / "encoder.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EncoderError(f"{path}: cannot be read ({error}); build the index again") from None
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        raise EncoderError(f"{path}: expected an object with a name, got {config!r:.80}")
    return config


# Words --------------------------------------------------------------------------------------------

_WORD = re.compile(r"[^\W_]+")


@record
class _Weights:
    """The cells of a matrix that are not empty."""

    shape: tuple[int, int]
    cells: np.ndarray
    """i64[used]: row * columns + column, ascending."""
    values: np.ndarray
    """f64[used]"""

    @property
    def lengths(self) -> np.ndarray:
        """f64[rows]: Euclidean length of each row."""
        rows = self.cells // self.shape[1]
        return np.sqrt(np.bincount(rows, self.values**2, minlength=self.shape[0]))

    def vectors(self, scale: np.ndarray) -> np.ndarray:
        """f32[rows, columns], each row divided by its scale f64[rows]."""
        vectors = np.zeros(self.shape, np.float32)
        vectors.reshape(-1)[self.cells] = self.values / scale[self.cells // self.shape[1]]
        return vectors


@record
class _Counts:
    """Words of one text by key, and how many there were (a whole title is not counted)."""

    words: Mapping[int, int]
    length: int


def split_words(text: str) -> list[str]:
    """Runs of letters and digits, without case and accents: "Gábor's" gives gabor, s."""
    if text.isascii():
        return _WORD.findall(text.lower())
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return _WORD.findall("".join(c for c in decomposed if not unicodedata.combining(c)))


def _passage_counts(document: Document, title_weight: int) -> _Counts:
    title = split_words(document.title)
    words = title * title_weight + split_words(document.text)
    counts = Counter(map(_key, words))
    if title:
        counts[_title_key(title)] = title_weight
    return _Counts(words=counts, length=len(words))


def _query_counts(query: str) -> _Counts:
    words = split_words(query)
    counts = Counter(map(_key, words))
    if words:
        counts[_title_key(words)] = len(words)
    return _Counts(words=counts, length=len(words))


@functools.lru_cache(maxsize=1 << 18)
def _key(word: str) -> int:
    """64 bits that stay the same between processes and versions, unlike `hash`."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _title_key(words: Sequence[str]) -> int:
    """The key of a whole title; no word holds a space or an equals sign."""
    return _key("= " + " ".join(words))


def _place(frequency: Mapping[int, int], places: int, *, choices: int = 16) -> np.ndarray:
    """i32[vocabulary, 2] in ascending order of keys: where each word lives among `places`.

    A place is as full as the passages its words occur in.
    """
    full = [0] * places
    chosen: dict[int, tuple[int, int]] = {}
    for word in sorted(frequency, key=lambda word: (-frequency[word], word)):
        start, step = word % places, 1 + (word >> 32) % (places - 1)
        first, second = -1, -1
        for place in {(start + i * step) % places: None for i in range(choices)}:
            if first < 0 or full[place] < full[first]:
                first, second = place, first
            elif second < 0 or full[place] < full[second]:
                second = place
            if not full[first]:
                second = -1
                break
        for place in (first, second):
            if place >= 0:
                full[place] += frequency[word]
        chosen[word] = (first, second)
    return np.array([chosen[word] for word in sorted(chosen)], np.int32).reshape(-1, 2)
