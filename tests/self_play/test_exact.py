import gzip
import json
import os
from pathlib import Path

import pytest

from sspjax.self_play.exact import cover_match, exact_match, f1, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("1,000", "1000"),
        ("U.S.", "us"),
        ("an apple a day", "apple day"),
        ("Theatre", "theatre"),
        ("Spider-Man", "spiderman"),
        ("it's", "its"),
        ("Café – Zürich", "café – zürich"),
        ("the", ""),
        ("?!", ""),
        ("a.n. other", "other"),
    ],
)
def test_normalise(text, normal):
    assert normalise(text) == normal


def test_exact_match_needs_the_whole_answer():
    assert exact_match("beatles", ["The Beatles"])
    assert exact_match("Oslo.", ["Bergen", "Oslo"])
    assert not exact_match("in Oslo", ["Oslo"])
    assert not exact_match("Zurich", ["Zürich"])


def test_cover_match_needs_it_somewhere():
    assert cover_match("in the city of Oslo", ["Oslo"])
    assert cover_match("Oslofjord", ["Oslo"])
    assert not cover_match("Oslo", ["Oslo fjord"])


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("lower leg", ["leg"], 2 / 3),  # precision 1/2, recall 1
        ("April 1", ["April 1st"], 1 / 2),
        ("a b b c", ["b b d"], 4 / 6),  # "a" is an article; two of three shared on both sides
        ("x", ["y", "x"], 1.0),
        ("x", ["y"], 0.0),
        ("", ["y"], 0.0),
    ],
)
def test_f1(prediction, answers, score):
    assert f1(prediction, answers) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("prediction", ["", "the", "!", "Oslo"])
@pytest.mark.parametrize("answers", [[], [""], ["the"], ["!?"]])
def test_an_answer_that_is_nothing_matches_nothing(prediction, answers):
    assert not exact_match(prediction, answers)
    assert not cover_match(prediction, answers)
    assert f1(prediction, answers) == 0.0


def test_agrees_with_the_scores_of_another_system():
    if "SSPJAX_DATA" not in os.environ:
        pytest.skip("SSPJAX_DATA is not set: no recorded scores")
    path = Path(os.environ["SSPJAX_DATA"]) / "fixtures" / "searchr1_scores.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 438
    for row in rows:
        said, golds = row["pred"], row["golden_answers"]
        assert exact_match(said, golds) == bool(row["em"]), row
        assert cover_match(said, golds) == bool(row["acc"]), row
        assert f1(said, golds) == pytest.approx(row["f1"], abs=1e-12), row
