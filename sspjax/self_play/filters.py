"""Rule filters: what a question must satisfy before anybody reads it.

The rules run in the order of `FILTERS`, cheapest first, and the first that fails gives the one
reason. The paper (SSP, arXiv 2510.18821, section 3.3) names four: no question, no search, too
short, leak. The upper length, the count of distinct searches and the ban on repeated ones are its
code's; each has its own setting.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from sspjax.config import FiltersConfig, ProposerConfig
from sspjax.self_play.exact import normalise
from sspjax.types import Question, Reason, Trajectory

Filter = Callable[[Trajectory, Question, FiltersConfig, ProposerConfig], Reason | None]


def no_search(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """A search was asked for and none was executed; an empty query is no search."""
    unsearched = proposer.min_searches > 0 and not any(trajectory.queries)
    return Reason.NO_SEARCH if unsearched else None


def few_searches(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """Fewer distinct queries were executed than `min_searches`, empty ones not counted."""
    few = len(set(filter(None, trajectory.queries))) < proposer.min_searches
    return Reason.FEW_SEARCHES if few else None


def repeated_search(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """A query was executed twice, character for character."""
    repeated = len(set(trajectory.queries)) < len(trajectory.queries)
    banned = filters.repeated_searches == "reject"
    return Reason.REPEATED_SEARCH if banned and repeated else None


def searched_answer(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """A query gives away the answer or one of the aliases (off in the paper's runs)."""
    banned = filters.searched_answer == "reject"
    given = banned and any(reveals(q, a) for q in trajectory.queries for a in question.answers)
    return Reason.SEARCHED_ANSWER if given else None


def too_short(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """Fewer characters than `min_chars`, or fewer words than `min_words`."""
    text = question.text
    short = len(text) < filters.min_chars or len(text.split()) < filters.min_words
    return Reason.TOO_SHORT if short else None


def too_long(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """More characters than `max_chars`."""
    return Reason.TOO_LONG if len(question.text) > filters.max_chars else None


def leak(
    trajectory: Trajectory, question: Question, filters: FiltersConfig, proposer: ProposerConfig
) -> Reason | None:
    """The question gives away its answer or one of the aliases."""
    leaks = any(reveals(question.text, answer) for answer in question.answers)
    return Reason.LEAK if leaks else None


FILTERS: dict[str, Filter] = {
    "no_search": no_search,
    "few_searches": few_searches,
    "repeated_search": repeated_search,
    "too_short": too_short,
    "too_long": too_long,
    "leak": leak,
    "searched_answer": searched_answer,
}
"""In the order in which they run, after `no_question`, which needs no rule."""


def first_failure(
    trajectory: Trajectory,
    question: Question | None,
    filters: FiltersConfig,
    proposer: ProposerConfig,
) -> Reason | None:
    """Why the question is rejected: the first rule that fails, or None."""
    if question is None:
        return Reason.NO_QUESTION
    for rule in FILTERS.values():
        if reason := rule(trajectory, question, filters, proposer):
            return reason
    return None


_SUBSTRING_CHARS = 3
_LEADING_ARTICLE = re.compile(r"^(a|an|the)\s+", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_PLAIN_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ı": "i", "æ": "ae", "œ": "oe", "þ": "th"}
)
"""Latin letters that Unicode does not decompose into a letter and an accent."""


def reveals(text: str, answer: str) -> bool:
    """True when `text` contains `answer` in any spelling a reader would recognise.

    Two ways to contain it: literally, as characters without regard to case (SSP's rule), or spelled
    by whole consecutive words once accents and punctuation are gone, so that "the U.S." is found in
    "US", "Spider-Man" in "spider man" and "Dvořák" in "Dvorak's". The second errs on the side of
    rejecting.

    Answers shorter than three characters are looked for as whole words only: the alias "A" or "5"
    must not reject every question with that letter in it. An answer that normalises to nothing
    cannot be matched by any prediction and is not looked for.
    """
    answer = answer.strip()
    if not normalise(answer):
        return False
    if len(answer) >= _SUBSTRING_CHARS and answer.casefold() in text.casefold():
        return True
    return _spelled(_words(text), "".join(_words(_LEADING_ARTICLE.sub("", answer))))


def _words(text: str) -> list[str]:
    """Runs of letters and digits, without case and accents."""
    decomposed = unicodedata.normalize("NFKD", text.casefold().translate(_PLAIN_LETTERS))
    letters = "".join(c for c in decomposed if not unicodedata.combining(c))
    return _WORD.findall(letters)


def _spelled(words: list[str], spelling: str) -> bool:
    """True when some run of whole words, joined, is `spelling`."""
    for start in range(len(words)):
        run = ""
        for word in words[start:]:
            run += word
            if not spelling.startswith(run):
                break
            if run == spelling:
                return True
    return False
