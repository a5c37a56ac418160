"""Compare answers to the user's test inputs with the expected ones and with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison, Family
from slipway.texts import shortened
from slipway.validation.answers import AnswerComparison, AnswerExample, Score
from slipway_validate.answers import scores
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
from slipway_validate.protocol.messages import Answers, EncodedInputs

Answer = tuple[float, ...]
EXAMPLES, EXAMPLE_LENGTH = 5, 400


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

    def _scores(self, answers: Sequence[Answer], texts: Sequence[str]) -> tuple[scores.Scores, str]:
        """Score the answers to records with an expected answer; return the scores, and what is missing for them."""
        known = [number for number, record in enumerate(self.records) if record.format_expected()]
        if not known:
            return {}, ""
        answered = _Answered(
            [self.records[number] for number in known],
            [answers[number] for number in known],
            [texts[number] for number in known],
        )
        return scores.run(lambda: self._score(answered))

    def _score(self, known: _Answered) -> scores.Scores:
        own, wanted = known.texts, [record.format_expected() for record in known.records]
        match known.records[0]:
            case Prompted():
                contains = [isinstance(record, Prompted) and record.match == "contains" for record in known.records]
                return scores.expected_share(own, wanted, contains)
            case Translated() | Transcribed() as first:
                return (scores.translation if isinstance(first, Translated) else scores.transcription)(own, wanted)
            case Asked():
                return scores.spans(own, [record.answers for record in known.records if isinstance(record, Asked)])
            case Pair():
                return scores.correlations(known.numbers, list(map(float, wanted)))
            case LabelledTokens():
                labels = [record.labels for record in known.records if isinstance(record, LabelledTokens)]
                return scores.token_classes(" ".join(own).split(), [self._name(each) for row in labels for each in row])
        return self._class_scores(known)

    def _class_scores(self, known: _Answered) -> scores.Scores:
        given = [record.label for record in known.records if isinstance(record, LabelledText)]
        if self._is_regression():
            return scores.correlations(known.numbers, [float(each) for each in given if isinstance(each, int | float)])
        if self._has_several():
            sets = [frozenset(filter(None, text.split(", "))) for text in known.texts]
            rows = [each if isinstance(each, tuple) else (str(each),) for each in given]
            return scores.label_sets(sets, [frozenset(map(self._name, row)) for row in rows])
        return scores.classes(known.texts, [self._name(each) for each in given])

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
