"""Readers of answers and questions, at the edge: files in, nouns out, every defect named.

JSONL, plain or gzip (`.gz`). Answers: Search Self-Play's list (`ground_truth`, `search_turns`) and
our own (`answer` or `answers`, `aliases`, `hops`). Questions: FlashRAG (`golden_answers`), our own
(`answers`), and the rows of Search-R1 and verl (`reward_model.ground_truth.target`).
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from sspjax.errors import UserError
from sspjax.types import Question, Seed

log = logging.getLogger(__name__)

Row = Mapping[str, Any]


class DataError(UserError, ValueError):
    """A data file that cannot be used. The message is one line: where, expected, got, the fix."""


def read_answers(path: str | os.PathLike[str]) -> tuple[Seed, ...]:
    """The seeds of an answers file, in its order.

    A row has `ground_truth` (with `search_turns`), `answer`, or `answers` (the first is canonical),
    and perhaps `aliases`, `hops` and a `uid` or `id`. Repeated answers are kept and warned about.
    Raises DataError.
    """
    path = pathlib.Path(path)
    seeds = [_seed(row, where) for row, where in _rows(path)]
    uids = _distinct([seed.uid for seed in seeds], path, "id")
    _distinct([str(seed.answer) for seed in seeds], path, "answer")
    return tuple(
        Seed(uid=uid, answer=s.answer, aliases=s.aliases, hops=s.hops)
        for uid, s in zip(uids, seeds, strict=True)
    )


def read_questions(path: str | os.PathLike[str]) -> tuple[Question, ...]:
    """The questions of a benchmark file, in its order.

    Answers are read from `answers`, `golden_answers` or `reward_model.ground_truth.target`, a
    string or a list whose first is canonical; the text from `question`, `extra_info.question` or
    the last user message of `prompt` (what follows its last "Question:"). Repeated questions are
    kept and warned about. Raises DataError.
    """
    path = pathlib.Path(path)
    questions = [_question(row, where) for row, where in _rows(path)]
    uids = _distinct([question.uid for question in questions], path, "id")
    _distinct([question.text for question in questions], path, "question")
    return tuple(
        Question(uid=uid, text=q.text, answer=q.answer, aliases=q.aliases)
        for uid, q in zip(uids, questions, strict=True)
    )


def _seed(row: Row, where: str) -> Seed:
    _, value = _field(row, ("answers", "answer", "ground_truth"), where)
    answer, *aliases = _strings(value, "an answer", where)
    if row.get("aliases"):
        aliases += _strings(row["aliases"], "an alias", where)
    hops = row.get("hops", row.get("search_turns", 1))
    if not str(hops).isdecimal() or int(hops) < 1:
        raise DataError(f"{where}: hops {hops!r}: expected a whole number of at least 1")
    return Seed(
        uid=_uid(row, where), answer=answer, aliases=_others(answer, aliases), hops=int(hops)
    )


def _question(row: Row, where: str) -> Question:
    if "reward_model" in row and not row.keys() & {"answers", "golden_answers"}:
        truth = _object(row["reward_model"], "reward_model", where)
        _, target = _field(truth, ("ground_truth",), where)
        if isinstance(target, Mapping):
            _, target = _field(target, ("target",), where)
    else:
        _, target = _field(row, ("answers", "golden_answers", "reward_model"), where)
    answer, *aliases = _strings(target, "an answer", where)
    return Question(
        uid=_uid(row, where),
        text=_question_text(row, where),
        answer=answer,
        aliases=_others(answer, aliases),
    )


def _question_text(row: Row, where: str) -> str:
    extra = row.get("extra_info") or {}
    if "question" in row:
        text = row["question"]
    elif isinstance(extra, Mapping) and "question" in extra:
        text = extra["question"]
    else:
        _, prompt = _field(row, ("question", "prompt"), where)
        text = _last_user_message(prompt, where) if isinstance(prompt, list) else prompt
        if isinstance(text, str):
            text = text.rpartition("Question:")[2]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: the question is {text!r}: expected a text that is not blank")
    return text.strip()


def _last_user_message(prompt: list[Any], where: str) -> Any:
    messages = [_object(message, "a message of prompt", where) for message in prompt]
    contents = [m.get("content") for m in messages if m.get("role") == "user"]
    if not contents:
        raise DataError(f"{where}: prompt has no message with role user, where the question stands")
    return contents[-1]


def _uid(row: Row, where: str) -> str:
    """`uid`, `id`, or verl's `data_source` and index; else the place in the file."""
    for name in ("uid", "id"):
        if row.get(name) is not None:
            return str(row[name])
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and extra.get("index") is not None:
        return f"{row.get('data_source', 'row')}-{extra['index']}"
    return pathlib.PurePath(where).name


def _field(row: Row, names: tuple[str, ...], where: str) -> tuple[str, Any]:
    for name in names:
        if name in row:
            return name, row[name]
    expected = " or ".join(repr(name) for name in names)
    found = ", ".join(repr(name) for name in row) or "nothing"
    raise DataError(f"{where}: expected the field {expected}, found {found}")


def _object(value: Any, name: str, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {name} is {_shown(value)}: expected a JSON object")
    return value


def _strings(value: Any, what: str, where: str) -> list[str]:
    """A string, or a list of at least one, none of them blank."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise DataError(
            f"{where}: {what} is {_shown(value)}: expected a string or a list of at least one"
        )
    for text in values:
        if not isinstance(text, str):
            raise DataError(f"{where}: {what} is {_shown(text)}: expected a string")
        if not text.strip():
            raise DataError(f"{where}: {what} is {text!r}, blank: remove the row or fill it in")
    return [text.strip() for text in values]


def _others(answer: str, aliases: list[str]) -> tuple[str, ...]:
    return tuple(alias for alias in dict.fromkeys(aliases) if alias != answer)


def _distinct(values: list[str], path: pathlib.Path, what: str) -> list[str]:
    """The values, repeated ones told apart by #2, #3, ...; warns when there are any."""
    times: dict[str, int] = {}
    result = []
    for value in values:
        times[value] = times.get(value, 0) + 1
        result.append(value if times[value] == 1 else f"{value}#{times[value]}")
    repeated = [value for value, count in times.items() if count > 1]
    if repeated:
        log.warning(
            "%s: %d of %d rows repeat the %s of an earlier row (for example %r)",
            path,
            len(values) - len(times),
            len(values),
            what,
            repeated[0],
        )
    return result


def _rows(path: pathlib.Path) -> Iterator[tuple[Row, str]]:
    """The objects of a JSONL file, each with `file:line` for messages; blank lines are skipped."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected JSONL, one object a line")
    if path.suffix == ".parquet":
        raise DataError(f"{path}: Parquet is not read here; expected JSONL, one object a line")
    number, empty = 0, True
    packed = path.suffix == ".gz"
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if packed
            else path.open(encoding="utf-8") as lines
        ):
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    yield _parsed(line, f"{path}:{number}"), f"{path}:{number}"
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}:{number + 1}: broken gzip ({error}); copy it anew") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number + 1}: expected UTF-8 text ({error})") from None
    if empty:
        raise DataError(f"{path}: the file is empty; expected one JSON object a line")


def _parsed(line: str, where: str) -> Row:
    try:
        value = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: malformed JSON: {error.msg} (column {error.colno})") from None
    return _object(value, "the row", where)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
