"""Corpora: both layouts, and everything that can be wrong with a file."""

import gzip
import hashlib
import json

import pytest

from sspjax.retrieval.corpus import CorpusError, MemoryCorpus, read_corpus, split_contents
from sspjax.types import Document

ROWS = [
    {"id": "a", "title": "Ada Lovelace", "text": "She wrote notes."},
    {"id": "b", "title": "Ada", "text": "A language."},
    {"id": "c", "title": "Ada", "text": "Second half."},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_ids_and_titles(tmp_path):
    corpus = read_corpus(write(tmp_path / "c.jsonl", ROWS))
    assert len(corpus) == 3
    assert corpus.document(1) == Document(id="b", title="Ada", text="A language.")
    assert corpus.row("c") == 2
    assert [d.id for d in corpus.by_title("Ada")] == ["b", "c"]
    assert corpus.by_title("ada") == ()
    assert [d.id for d in corpus] == ["a", "b", "c"]
    with pytest.raises(KeyError):
        corpus.row("z")


@pytest.mark.parametrize("row", [-1, 3])
def test_a_missing_row_is_never_the_last_passage(row):
    corpus = MemoryCorpus([Document(**r) for r in ROWS])
    with pytest.raises(IndexError, match="rows 0 to 2"):
        corpus.document(row)


def test_contents_gzip_numbers_blank_lines_and_bom(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    lines = [
        '\ufeff{"id": 0, "contents": "\\"A \\"quoted\\" Title\\"\\nOne.\\nTwo.", "score": 1}',
        "",
        '{"id": "1", "title": "T", "text": "", "contents": "ignored"}',
        "   ",
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    corpus = read_corpus(path)
    assert list(corpus) == [
        Document(id="0", title='A "quoted" Title', text="One.\nTwo."),
        Document(id="1", title="T", text=""),
    ]


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"T"\ntext', "T", "text"),
        ("T\ntext", "T", "text"),
        ('"T"', "T", ""),
        ("just text", "", "just text"),
        ('"', "", '"'),
        ('"T"\n', "T", ""),
    ],
)
def test_contents_split(contents, title, text):
    assert split_contents(contents) == (title, text)


def test_content_hash_is_of_ids_titles_and_texts(tmp_path):
    corpus = read_corpus(write(tmp_path / "c.jsonl", ROWS))
    expected = hashlib.sha256()
    for row in ROWS:
        for name in ("id", "title", "text"):
            expected.update(len(row[name]).to_bytes(8, "little") + row[name].encode())
    assert corpus.content_hash == expected.hexdigest()

    both = [
        {"id": row["id"], "contents": f'"{row["title"]}"\n{row["text"]}', "extra": 1}
        for row in ROWS
    ]
    assert read_corpus(write(tmp_path / "d.jsonl", both)).content_hash == corpus.content_hash
    swapped = [ROWS[1], ROWS[0], ROWS[2]]
    assert read_corpus(write(tmp_path / "e.jsonl", swapped)).content_hash != corpus.content_hash
    shifted = [{"id": "a", "title": "Ada LovelaceS", "text": "he wrote notes."}, *ROWS[1:]]
    assert read_corpus(write(tmp_path / "f.jsonl", shifted)).content_hash != corpus.content_hash


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no passages"),
        (b"\n \n", "no passages"),
        (b'{"id": "a", "title": "t", "text": "x"}\n{"id": ', ":2: not JSON"),
        (b'{"id": "a", "title": "t", "text": "\xff"}\n', ":1: not UTF-8 .byte 35"),
        (b'["a"]\n', ":1: expected a JSON object, got list"),
        (b'{"id": "a", "title": "t"}\n', "or id, title and text; found id, title"),
        (b"{}\n", "found nothing"),
        (b'{"docid": "a", "contents": "t"}\n', "found docid, contents"),
        (b'{"id": null, "contents": "t"}\n', "id must be a string, got NoneType"),
        (b'{"id": true, "contents": "t"}\n', "id must be a string, got bool"),
        (b'{"id": "a", "title": "t", "text": null}\n', "text must be a string, got NoneType"),
        (b'{"id": "a", "contents": ["t"]}\n', "contents must be a string, got list"),
        (b'{"id": "a", "contents": "\\ud800"}\n', ":1: .*surrogate"),
        (
            b'{"id": "a", "contents": "x"}\n\n{"id": "a", "contents": "y"}\n',
            ":3: id 'a' is already used on line 1",
        ),
        (b"[" * 100_000, ":1: not JSON"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, content, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read_corpus(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(CorpusError, match="no such file"):
        read_corpus(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="cannot be read"):
        read_corpus(tmp_path)
    plain = write(tmp_path / "plain.jsonl.gz", ROWS)
    with pytest.raises(CorpusError, match="cannot be read"):
        read_corpus(plain)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 50)[:-9])
    with pytest.raises(CorpusError, match="cannot be read"):
        read_corpus(cut)


def test_a_corpus_in_memory_obeys_the_same_rules():
    with pytest.raises(CorpusError, match="at least one"):
        MemoryCorpus([])
    with pytest.raises(CorpusError, match="passages 0 and 1"):
        MemoryCorpus([Document(id="a", title="", text="x")] * 2)
    with pytest.raises(CorpusError, match="surrogate"):
        MemoryCorpus([Document(id="a", title="", text="\udc00")])
