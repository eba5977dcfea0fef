"""String scores of an answer, with Search-R1's normalisation (`qa_em.py`, after SQuAD).

One deliberate difference: an accepted answer that normalises to nothing ("the", "!!!") matches no
prediction. In Search-R1 it equals every empty prediction and is contained in all of them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces.

    Punctuation leaves no space behind: "1,000" is "1000" and "U.S." is "us". Accents and other
    scripts' punctuation stay.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True when the prediction equals any accepted answer after normalisation."""
    return normalise(prediction) in _golds(answers)


def cover_match(prediction: str, answers: Sequence[str]) -> bool:
    """True when any accepted answer is contained in the prediction, as characters."""
    said = normalise(prediction)
    return any(gold in said for gold in _golds(answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Best harmonic mean of token precision and recall over the accepted answers, in 0..1."""
    said = normalise(prediction).split()
    return max((_f1(said, gold.split()) for gold in _golds(answers)), default=0.0)


def _golds(answers: Sequence[str]) -> list[str]:
    return [gold for gold in map(normalise, answers) if gold]


def _f1(said: list[str], gold: list[str]) -> float:
    shared = (Counter(said) & Counter(gold)).total()
    return 2 * shared / (len(said) + len(gold))
