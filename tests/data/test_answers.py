"""Files of others and our own become nouns, and every defect is named."""

import gzip
import json
import os
import pathlib

import pytest

from sspjax.data.answers import DataError, read_answers, read_questions
from sspjax.types import Question, Seed


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="file.jsonl") -> pathlib.Path:
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


# Answers ------------------------------------------------------------------------------------------


def test_search_self_play_answers(write):
    path = write(
        {"sys_question_example": "Question 1: ...", "ground_truth": "Paris", "search_turns": "2"},
        {"sys_question_example": "", "ground_truth": " New York City ", "search_turns": "3"},
    )
    assert read_answers(path) == (
        Seed(uid="file.jsonl:1", answer="Paris", hops=2),
        Seed(uid="file.jsonl:2", answer="New York City", hops=3),
    )


def test_our_own_answers(write):
    path = write(
        {"uid": "city-1", "answer": "Paris", "aliases": ["City of Light"], "hops": 4},
        {"id": 7, "answers": ["Rome", "Roma", "Rome"]},
        {"id": "b", "answers": ["Oslo", "Christiania"], "aliases": ["Kristiania"]},
        {"id": None, "answer": "Bern"},
    )
    assert read_answers(path) == (
        Seed(uid="city-1", answer="Paris", aliases=("City of Light",), hops=4),
        Seed(uid="7", answer="Rome", aliases=("Roma",)),
        Seed(uid="b", answer="Oslo", aliases=("Christiania", "Kristiania")),
        Seed(uid="file.jsonl:4", answer="Bern"),
    )


def test_gzip_and_blank_lines_and_other_scripts(write):
    path = write({"answer": "東京"}, "", {"answer": "Åre"}, name="a.jsonl.gz")
    assert [seed.answer for seed in read_answers(path)] == ["東京", "Åre"]
    assert [seed.uid for seed in read_answers(path)] == ["a.jsonl.gz:1", "a.jsonl.gz:3"]


def test_repeated_answers_are_kept_and_reported(write, caplog):
    path = write({"answer": "Paris"}, {"answer": "Rome"}, {"answer": "Paris"})
    assert [seed.answer for seed in read_answers(path)] == ["Paris", "Rome", "Paris"]
    assert "1 of 3 rows repeat the answer" in caplog.text
    assert "'Paris'" in caplog.text


def test_repeated_ids_are_told_apart_and_reported(write, caplog):
    path = write(*({"id": 0, "answer": a} for a in ("Paris", "Rome", "Oslo")))
    assert [seed.uid for seed in read_answers(path)] == ["0", "0#2", "0#3"]
    assert "2 of 3 rows repeat the id" in caplog.text


def test_a_clean_file_warns_of_nothing(write, caplog):
    read_answers(write({"answer": "Paris"}, {"answer": "Rome"}))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "  "}, r"file.jsonl:2: an answer is '  ', blank"),
        ({"answers": ["Rome", "\t"]}, r"file.jsonl:2: an answer is '\\t', blank"),
        ({"answers": []}, r"file.jsonl:2: an answer is \[\]: expected a string or a list"),
        ({"answer": 12}, r"file.jsonl:2: an answer is 12: expected a string"),
        ({"answers": [None]}, r"file.jsonl:2: an answer is None: expected a string"),
        ({"answer": "Rome", "aliases": [" "]}, r"file.jsonl:2: an alias is ' ', blank"),
        (
            {"question": "Q", "text": "T"},
            r"file.jsonl:2: .*'ground_truth', found 'question', 'text'",
        ),
        ({}, r"file.jsonl:2: expected the field .* found nothing"),
        ({"answer": "Rome", "hops": 0}, r"file.jsonl:2: hops 0: expected a whole number"),
        ({"answer": "Rome", "hops": 1.5}, r"file.jsonl:2: hops 1.5: expected"),
        ({"ground_truth": "Rome", "search_turns": "many"}, r"file.jsonl:2: hops 'many'"),
        ("[1, 2]", r"file.jsonl:2: the row is \[1, 2\]: expected a JSON object"),
        ('{"answer": "Rome"', r"file.jsonl:2: malformed JSON: .*column 18"),
    ],
)
def test_bad_rows_are_named_by_line(write, row, message):
    with pytest.raises(DataError, match=message):
        read_answers(write({"answer": "Paris"}, row))


def test_data_errors_are_value_errors():
    assert issubclass(DataError, ValueError)


@pytest.mark.parametrize("read", [read_answers, read_questions])
class TestFiles:
    def test_missing(self, read, tmp_path):
        with pytest.raises(DataError, match="none.jsonl: no such file"):
            read(tmp_path / "none.jsonl")

    def test_folder(self, read, tmp_path):
        with pytest.raises(DataError, match="no such file"):
            read(tmp_path)

    @pytest.mark.parametrize("rows", [(), ("", "  ")])
    def test_empty(self, read, write, rows):
        with pytest.raises(DataError, match="file.jsonl: the file is empty"):
            read(write(*rows))

    def test_empty_gzip(self, read, write):
        with pytest.raises(DataError, match="the file is empty"):
            read(write(name="a.jsonl.gz"))

    def test_gzip_in_name_only(self, read, tmp_path):
        path = tmp_path / "a.jsonl.gz"
        path.write_text('{"answer": "Paris"}\n')
        with pytest.raises(DataError, match="broken gzip"):
            read(path)

    def test_cut_gzip(self, read, tmp_path):
        rows = "".join(
            json.dumps({"id": i, "question": f"Q{i}?", "answers": [f"{i * 7919}"]}) + "\n"
            for i in range(500)
        )
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(rows.encode())[:-200])
        with pytest.raises(DataError, match="broken gzip"):
            read(path)

    def test_gzip_without_the_name(self, read, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(gzip.compress(b'{"answer": "Paris"}\n'))
        with pytest.raises(DataError, match="a.jsonl:1: expected UTF-8"):
            read(path)

    def test_parquet(self, read, tmp_path):
        path = tmp_path / "a.parquet"
        path.write_bytes(b"PAR1")
        with pytest.raises(DataError, match="Parquet.*expected JSONL"):
            read(path)


# Questions ----------------------------------------------------------------------------------------


def test_flashrag_questions(write):
    path = write({"id": "test_0", "question": "who?", "golden_answers": ["Ann", "Anne"]})
    assert read_questions(path) == (
        Question(uid="test_0", text="who?", answer="Ann", aliases=("Anne",)),
    )


def test_our_own_questions(write):
    path = write({"id": "1hop-0", "question": "who ?", "answers": ["Ann"], "gold": ["d1"]})
    assert read_questions(path) == (Question(uid="1hop-0", text="who ?", answer="Ann"),)


SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. Question: who is it?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Anne"]}},
    "extra_info": {"split": "test", "index": 3},
}


def test_search_r1_rows(write):
    path = write(SEARCH_R1)
    assert read_questions(path) == (
        Question(uid="nq-3", text="who is it?", answer="Ann", aliases=("Anne",)),
    )


def test_verl_target_as_a_string(write):
    rows = (
        {**SEARCH_R1, "reward_model": {"ground_truth": {"target": "Ann"}}},
        {**SEARCH_R1, "reward_model": {"ground_truth": "Ann"}, "extra_info": {"index": 4}},
    )
    assert [(q.answer, q.aliases) for q in read_questions(write(*rows))] == [("Ann", ())] * 2


def test_verl_question_field_goes_before_the_prompt(write):
    rows = (
        {**SEARCH_R1, "question": "from the row?"},
        {**SEARCH_R1, "extra_info": {"index": 9, "question": "from the extra info?"}},
        {**SEARCH_R1, "prompt": "Question: from a plain prompt?", "extra_info": {"index": 10}},
    )
    texts = [q.text for q in read_questions(write(*rows))]
    assert texts == ["from the row?", "from the extra info?", "from a plain prompt?"]


def test_verl_system_message_is_not_the_question(write):
    prompt = [
        {"role": "system", "content": "Question: not this one?"},
        {"role": "user", "content": "this one?"},
    ]
    (question,) = read_questions(write({**SEARCH_R1, "prompt": prompt}))
    assert question.text == "this one?"


def test_equal_indices_of_two_data_sets_are_two_questions(write, caplog):
    """Search-R1's merged set numbers each data set from 0."""
    rows = [{**SEARCH_R1, "data_source": s, "question": f"{s}?"} for s in ("nq", "hotpotqa")]
    assert [q.uid for q in read_questions(write(*rows))] == ["nq-3", "hotpotqa-3"]
    assert caplog.text == ""


def test_repeated_questions_are_kept_and_reported(write, caplog):
    rows = [{"id": i, "question": "who?", "answers": ["Ann"]} for i in range(2)]
    assert len(read_questions(write(*rows))) == 2
    assert "1 of 2 rows repeat the question" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "who?"},
            r"'answers' or 'golden_answers' or 'reward_model', found 'question'",
        ),
        ({"answers": ["Ann"]}, r"'question' or 'prompt', found 'answers'"),
        ({"question": " ", "answers": ["Ann"]}, r"the question is ' ': expected a text"),
        ({"question": 3, "answers": ["Ann"]}, r"the question is 3"),
        ({"question": "who?", "answers": [""]}, r"an answer is '', blank"),
        ({"question": "who?", "golden_answers": None}, r"an answer is None"),
        ({"question": "who?", "reward_model": "rule"}, r"reward_model is 'rule': expected a JSON"),
        ({"question": "who?", "reward_model": {}}, r"expected the field 'ground_truth'"),
        (
            {"question": "who?", "reward_model": {"ground_truth": {"goal": 1}}},
            r"'target', found 'goal'",
        ),
        ({**SEARCH_R1, "prompt": []}, r"no message with role user"),
        ({**SEARCH_R1, "prompt": ["hello"]}, r"a message of prompt is 'hello'"),
        ({**SEARCH_R1, "prompt": [{"role": "user"}]}, r"the question is None"),
    ],
)
def test_bad_questions_are_named_by_line(write, row, message):
    with pytest.raises(DataError, match="file.jsonl:1: .*" + message):
        read_questions(write(row))


@pytest.mark.skipif("SSPJAX_DATA" not in os.environ, reason="SSPJAX_DATA is not set")
def test_real_benchmarks():
    folder = pathlib.Path(os.environ["SSPJAX_DATA"]) / "questions"
    files = [path for path in folder.glob("*.jsonl.gz") if ".extra" not in path.name]
    assert files
    for path in files:
        questions = read_questions(path)
        assert len(questions) >= 60
        assert all(q.text and q.answer for q in questions)
