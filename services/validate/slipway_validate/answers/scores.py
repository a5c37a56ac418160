"""Score answers against the expected ones.

BLEU and chrF are computed by sacrebleu, error rates by jiwer, which the extra ``metrics`` installs; without them they are *not run*, by
name. All scores are shares, so that one limit can judge the loss of each.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from slipway.distribution.installed import install_command

Texts = Sequence[str]
Scores = Mapping[str, float]

INSTALL = install_command("metrics")


class NotInstalledError(Exception):
    """A score's library is not installed; the message names score and library."""


def _require_module(names: str, module: str) -> None:
    if find_spec(module) is None:
        raise NotInstalledError(f"{names}: {module} is not installed: {INSTALL}")


def translation(answers: Texts, expected: Texts) -> Scores:
    """Return chrF and BLEU of a corpus. Sources: Popović, 2015; Papineni et al., 2002; Post, 2018 (sacrebleu)."""
    _require_module("chrf, bleu", "sacrebleu")
    import sacrebleu

    references = [list(expected)]
    chrf = sacrebleu.corpus_chrf(list(answers), references).score
    return {"chrf": chrf / 100, "bleu": sacrebleu.corpus_bleu(list(answers), references).score / 100}


def transcription(answers: Texts, expected: Texts) -> Scores:
    """Return the error rates of words and characters over all texts; case, punctuation and spaces do not count.

    A rate is (substitutions + deletions + insertions) / expected; it can be above 1. Source: Morris et al., 2004 (jiwer).
    """
    _require_module("wer, cer", "jiwer")
    import jiwer

    ours, theirs = list(map(_normalise_speech, answers)), list(map(_normalise_speech, expected))
    if not any(theirs):
        return {}
    return {"wer": jiwer.process_words(theirs, ours).wer, "cer": jiwer.process_characters(theirs, ours).cer}


def classes(answers: Texts, expected: Texts) -> Scores:
    """Return accuracy, and the mean of the F1 of all classes that are expected or given."""
    labels = sorted({*answers, *expected})
    return {"accuracy": _accuracy(answers, expected), "f1": _mean([_f1(answers, expected, {each}) for each in labels])}


def token_classes(answers: Texts, expected: Texts) -> Scores:
    """Return the F1 over all words with a label other than ``O``, and the accuracy of all words."""
    labels = {*answers, *expected} - {"O"}
    return {"f1": _f1(answers, expected, labels) if labels else 1.0, "accuracy": _accuracy(answers, expected)}


def label_sets(answers: Sequence[frozenset[str]], expected: Sequence[frozenset[str]]) -> Scores:
    """Return the F1 over all labels of all texts, and the share of texts with exactly the expected labels."""
    right = sum(len(ours & theirs) for ours, theirs in zip(answers, expected, strict=True))
    named = sum(map(len, answers)) + sum(map(len, expected))
    exact = sum(ours == theirs for ours, theirs in zip(answers, expected, strict=True)) / len(expected)
    return {"f1": 2 * right / named if named else 1.0, "accuracy": exact}


def correlations(answers: Sequence[float], expected: Sequence[float]) -> Scores:
    """Return the correlation of ranks and that of values; none if one side is constant. Sources: Spearman, 1904; Pearson, 1895."""
    if len(set(answers)) < 2 or len(set(expected)) < 2:
        return {}
    pairs = {"spearman": (_ranks(answers), _ranks(expected)), "pearson": (np.array(answers), np.array(expected))}
    figures = {name: float(np.corrcoef(*pair)[0, 1]) for name, pair in pairs.items()}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def spans(answers: Texts, accepted: Sequence[Texts]) -> Scores:
    """Return F1 and exact match of answers to questions, each against the closest accepted answer.

    Source: Rajpurkar et al., "SQuAD", 2016: case, punctuation and articles do not count.
    """
    return {
        "f1": _mean([max(_overlap(own, each) for each in texts) for own, texts in zip(answers, accepted, strict=True)]),
        "exact_match": _mean(
            [any(_bare(own) == _bare(each) for each in texts) for own, texts in zip(answers, accepted, strict=True)]
        ),
    }


def expected_share(answers: Texts, expected: Texts, contains: Sequence[bool]) -> Scores:
    """Return the share of answers that are, or contain, the expected ones; case and spaces do not count."""
    pairs = zip(answers, expected, contains, strict=True)
    return {
        "as_expected": _mean(
            [_plain(theirs) in _plain(own) if part else _plain(own) == _plain(theirs) for own, theirs, part in pairs]
        )
    }


def run(score: Callable[[], Scores]) -> tuple[Scores, str]:
    """Return the scores and an empty text, or no scores and what is missing."""
    try:
        return score(), ""
    except NotInstalledError as error:
        return {}, str(error)


def _accuracy(answers: Texts, expected: Texts) -> float:
    return _mean([own == theirs for own, theirs in zip(answers, expected, strict=True)])


def _f1(answers: Texts, expected: Texts, labels: Collection[str]) -> float:
    """Return 2 · right / (given + expected) over some labels: the harmonic mean of precision and recall."""
    right = sum(own == theirs and own in labels for own, theirs in zip(answers, expected, strict=True))
    named = sum(own in labels for own in answers) + sum(theirs in labels for theirs in expected)
    return 2 * right / named if named else 0.0


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return ranks


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _normalise_speech(text: str) -> str:
    """Return the words of a text in small letters, without punctuation and symbols of any script."""
    return " ".join("".join(each for each in text.casefold() if unicodedata.category(each)[0] not in "PS").split())


def _bare(text: str) -> str:
    without = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without).split())


def _overlap(own: str, theirs: str) -> float:
    ours, expected = _bare(own).split(), _bare(theirs).split()
    if not ours or not expected:
        return float(ours == expected)
    common = sum((Counter(ours) & Counter(expected)).values())
    return 2 * common / (len(ours) + len(expected))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
