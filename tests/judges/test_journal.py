import json
import logging

import pytest

from sspjax.judges.journal import Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "judge" / "judge.jsonl"


def test_it_is_there_the_next_time(path):
    first = Journal(path, records=True)
    assert len(first) == 0
    first.put("a", "Correct", {"question": "שאלה 🙂\nline \u2028"})
    first.put("b", "Incorrect", {})
    first.put("a", "Incorrect", {})
    again = Journal(path, records=False)
    assert ("a" in again, "c" in again, len(again)) == (True, False, 2)
    assert (again["a"], again["b"]) == ("Correct", "Incorrect")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"key": "a", "reply": "Correct", "question": "שאלה 🙂\nline \u2028"}
    assert len(rows) == 2


def test_every_cut_of_the_file_keeps_the_whole_lines(path):
    """As a kill leaves it; what is written next is a line of its own."""
    journal = Journal(path, records=True)
    for key in ("a", "b", "c"):
        journal.put(key, f"reply {key}", {})
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = whole[:length].count(b"\n")
        cut = Journal(path, records=True)
        assert [k for k in ("a", "b", "c") if k in cut] == ["a", "b", "c"][:kept]
        cut.put("d", "reply d", {})
        cut.put("e", "reply e", {})
        after = Journal(path, records=True)
        assert len(after) == kept + 2
        assert after["d"] == "reply d"


def test_lines_that_cannot_be_read_are_left_out(path, caplog):
    path.parent.mkdir()
    good = json.dumps({"key": "a", "reply": "Correct"}).encode()
    lines = [b"\xff\xfe", b"[]", b'{"key": 1, "reply": "x"}', b"\0\0", good, b'{"key": "b"}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    journal = Journal(path, records=True)
    assert (len(journal), journal["a"]) == (1, "Correct")
    assert "5 lines cannot be read" in caplog.text


def test_who_only_looks_writes_nothing(path, caplog):
    caplog.set_level(logging.WARNING)
    journal = Journal(path, records=False)
    journal.put("a", "Correct", {})
    assert journal["a"] == "Correct"
    assert not path.parent.exists()
