"""Score answers against the expected ones, and compare an output's answers with the reference's.

They are answers to the user's test inputs. BLEU and chrF are computed by sacrebleu, error rates by jiwer, which the extra ``metrics``
installs; without them they are *not run*, by name. All scores are shares, so that one limit can judge the loss of each.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.distribution import install_command
from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison, Family
from slipway.texts import shortened
from slipway.validation.answers import AnswerComparison, AnswerExample, Score
from slipway_validate.answers.records import (
    Asked,
    LabelledText,
    LabelledTokens,
    Pair,
    Prompted,
    Record,
    Transcribed,
    Translated,
)
from slipway_validate.protocol.inputs import Answers, EncodedInputs

Texts = Sequence[str]
Scores = Mapping[str, float]

INSTALL = install_command("metrics")

Answer = tuple[float, ...]
EXAMPLES, EXAMPLE_LENGTH = 5, 400


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


@dataclass(frozen=True)
class _Answered:
    """Records with an expected answer, and a model's answers to them: as numbers, and as texts."""

    records: Sequence[Record]
    answers: Sequence[Answer]
    texts: Sequence[str]

    @property
    def numbers(self) -> list[float]:
        """Return answers that are one number each."""
        return [answer[0] for answer in self.answers]


@dataclass(frozen=True)
class Scorer:
    """Scores the answers of an output.

    Attributes:
        records: The test inputs.
        encoded: The same, encoded.
        family: The model's family.
        config: Contents of its ``config.json``, for the names of labels.
        decode: Function from token ids to text; None if there is none.
    """

    records: tuple[Record, ...]
    encoded: EncodedInputs
    family: Family
    config: ModelConfig
    decode: Callable[[Sequence[int]], str] | None

    def compare(self, theirs: Answers | None, ours: Answers | None) -> AnswerComparison | None:
        """Compare the answers of an output with the reference's; None if there are none."""
        if theirs is None or ours is None:
            return None
        skipped = ours.skipped or (f"the reference has no answers: {theirs.skipped}" if theirs.skipped else "")
        if not skipped and self.family.generates and self.decode is None:
            skipped = "the tokenizer has no tokenizer.json, so that answers cannot be read"
        if skipped:
            return AnswerComparison(inputs=len(self.records), skipped=skipped)
        texts = [self._texts(answers.answers) for answers in (theirs, ours)]
        reference, missing = self._scores(theirs.answers, texts[0])
        own, _ = self._scores(ours.answers, texts[1])
        known = [bool(record.format_expected()) for record in self.records]
        return AnswerComparison(
            inputs=len(self.records),
            with_expected=sum(known),
            agreement=self._agreement(*texts),
            scores=tuple(
                Score(name=name, value=own.get(name), reference=reference.get(name))
                for name in dict.fromkeys((*reference, *own))
            ),
            not_run=(missing,) if missing else (),
            examples=self._examples(*texts),
        )

    def _agreement(self, theirs: Sequence[str], ours: Sequence[str]) -> float | None:
        """Return the share of equal answers; numbers are compared by their scores only."""
        if self._gives_numbers():
            return None
        return sum(first == second for first, second in zip(theirs, ours, strict=True)) / len(theirs)

    def _gives_numbers(self) -> bool:
        return self.family.comparison is Comparison.EMBEDDINGS or self._is_regression()

    def _is_regression(self) -> bool:
        return isinstance(self.records[0], LabelledText) and len(self._labels()) == 1

    def _scores(self, answers: Sequence[Answer], texts: Sequence[str]) -> tuple[Scores, str]:
        """Score the answers to records with an expected answer; return the scores, and what is missing for them."""
        known = [number for number, record in enumerate(self.records) if record.format_expected()]
        if not known:
            return {}, ""
        answered = _Answered(
            [self.records[number] for number in known],
            [answers[number] for number in known],
            [texts[number] for number in known],
        )
        return run(lambda: self._score(answered))

    def _score(self, known: _Answered) -> Scores:
        own, wanted = known.texts, [record.format_expected() for record in known.records]
        match known.records[0]:
            case Prompted():
                contains = [isinstance(record, Prompted) and record.match == "contains" for record in known.records]
                return expected_share(own, wanted, contains)
            case Translated() | Transcribed() as first:
                return (translation if isinstance(first, Translated) else transcription)(own, wanted)
            case Asked():
                return spans(own, [record.answers for record in known.records if isinstance(record, Asked)])
            case Pair():
                return correlations(known.numbers, list(map(float, wanted)))
            case LabelledTokens():
                labels = [record.labels for record in known.records if isinstance(record, LabelledTokens)]
                return token_classes(" ".join(own).split(), [self._name(each) for row in labels for each in row])
        return self._class_scores(known)

    def _class_scores(self, known: _Answered) -> Scores:
        given = [record.label for record in known.records if isinstance(record, LabelledText)]
        if self._is_regression():
            return correlations(known.numbers, [float(each) for each in given if isinstance(each, int | float)])
        if self._has_several():
            sets = [frozenset(filter(None, text.split(", "))) for text in known.texts]
            rows = [each if isinstance(each, tuple) else (str(each),) for each in given]
            return label_sets(sets, [frozenset(map(self._name, row)) for row in rows])
        return classes(known.texts, [self._name(each) for each in given])

    def _texts(self, answers: Sequence[Answer]) -> list[str]:
        return [
            self._text(record, answer, number)
            for number, (record, answer) in enumerate(zip(self.records, answers, strict=True))
        ]

    def _text(self, record: Record, answer: Answer, number: int) -> str:
        """Return an answer as text."""
        match record:
            case Prompted() | Translated() | Transcribed():
                assert self.decode is not None
                return self.decode([int(token) for token in answer]).strip()
            case Asked():
                offsets = self.encoded.inputs[number].offsets
                first, last = (int(place) for place in answer)
                return record.context[offsets[first][0] : offsets[last][1]].strip()
            case LabelledTokens():
                return " ".join(self._name(int(label)) if label >= 0 else "O" for label in answer)
            case LabelledText() if self._has_several():
                pairs = zip(answer[0::2], answer[1::2], strict=True)
                return ", ".join(self._name(label) for label, (yes, no) in enumerate(pairs) if yes > no)
            case LabelledText() if not self._is_regression():
                return self._name(max(range(len(answer)), key=answer.__getitem__))
        return f"{answer[0]:.4g}"

    def _has_several(self) -> bool:
        return self.config.has_several_labels

    def _labels(self) -> Mapping[str, Any]:
        labels = self.config.get("id2label")
        return labels if isinstance(labels, dict) else {}

    def _name(self, label: object) -> str:
        """Return the name of a label that is given by its name or number, without spaces."""
        return "_".join(str(self._labels().get(str(label), label)).split())

    def _examples(self, theirs: Sequence[str], ours: Sequence[str]) -> tuple[AnswerExample, ...]:
        """Return some inputs, those with another answer than the reference's first."""
        order = sorted(range(len(ours)), key=lambda number: (ours[number] == theirs[number], number))
        return tuple(
            AnswerExample(
                input=shortened(self.records[number].format_input(), EXAMPLE_LENGTH),
                expected=shortened(self.records[number].format_expected(), EXAMPLE_LENGTH),
                reference=shortened(theirs[number], EXAMPLE_LENGTH),
                output=shortened(ours[number], EXAMPLE_LENGTH),
            )
            for number in order[:EXAMPLES]
        )
