"""Read the user's test inputs: prompts with expected answers, or labelled examples, as the model's family takes them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from slipway.errors import ValidationError
from slipway.files.json_documents import LARGEST_LIST, parse_json
from slipway.files.regular_file import read_regular
from slipway.model.configuration import ModelConfig
from slipway.model.families import (
    DECODER,
    ENCODER_DECODER,
    FEATURE_EXTRACTION,
    QUESTION_ANSWERING,
    RAW_SPEECH,
    SEQUENCE_CLASSIFIER,
    SPEECH,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.texts import quoted
from slipway.validation.inputs import AUDIO, ENDINGS, LARGEST, TEST_INPUTS, files_of_test_inputs, is_sound_name
from slipway_validate.params import SampleParams

MOST_RECORDS = 10_000
MOST_SOUNDS = 200
"""Most sounds that are answered: features of 30 seconds take 1 to 2 MB of disk."""
_MOST_CHARACTERS = 100_000
_Words = Annotated[str, StringConstraints(min_length=1, max_length=_MOST_CHARACTERS)]
_List = Annotated[tuple[_Words, ...], Field(min_length=1, max_length=4096)]


class Record(BaseModel):
    """One test input; ``form`` shows how it is written."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @abstractmethod
    def format_input(self) -> str:
        """Return the input as text."""

    @abstractmethod
    def format_expected(self) -> str:
        """Return the expected answer as text; empty if there is none."""


class Prompted(Record):
    """A prompt for a decoder, with the expected answer.

    Attributes:
        prompt: A text, or messages with ``role`` and ``content``.
        chat: Whether the model's chat template is applied, if it has one.
        expected: The expected answer; None compares with the reference's answer only.
        match: Whether the answer must be the expected one, or contain it; case and spaces do not count.
        max_new_tokens: Most tokens of the answer.
    """

    prompt: (
        _Words | Annotated[tuple[dict[Literal["role", "content"], _Words], ...], Field(min_length=1, max_length=100)]
    )
    chat: bool = True
    expected: _Words | None = None
    match: Literal["exact", "contains"] = "exact"
    max_new_tokens: int = Field(default=64, ge=1, le=1024)

    def format_input(self) -> str:
        """Return the prompt."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(part["content"] for part in self.prompt)

    def format_expected(self) -> str:
        """Return the expected answer."""
        return self.expected or ""


class Translated(Record):
    """A source text for an encoder–decoder, with the expected target text."""

    source: _Words
    target: _Words | None = None
    max_new_tokens: int = Field(default=128, ge=1, le=1024)

    def format_input(self) -> str:
        """Return the source."""
        return self.source

    def format_expected(self) -> str:
        """Return the target."""
        return self.target or ""


class Transcribed(Record):
    """A sound for a speech model, with the expected text.

    Attributes:
        audio: A WAV file below the folder of the file of records.
        text: What is said; None compares with the reference's answer only.
        language: Code of the language, such as ``de``, for a model of several; None takes that of the model's own files.
        max_new_tokens: Most tokens of the answer.
    """

    audio: _Words
    text: _Words | None = None
    language: _Words | None = None
    max_new_tokens: int = Field(default=200, ge=1, le=1024)

    @pydantic.field_validator("audio")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_sound_name(name):
            raise ValueError("it is not the name of a .wav file below the folder of the file of test inputs")
        return name

    def format_input(self) -> str:
        """Return the name of the sound."""
        return self.audio

    def format_expected(self) -> str:
        """Return the text."""
        return self.text or ""


class LabelledText(Record):
    """A text for a classifier with its label: its name or number, names of several labels, or a score."""

    text: _Words
    label: _Words | int | float | tuple[_Words, ...]

    def format_input(self) -> str:
        """Return the text."""
        return self.text

    def format_expected(self) -> str:
        """Return the label."""
        return ", ".join(self.label) if isinstance(self.label, tuple) else str(self.label)


class LabelledTokens(Record):
    """Words for a token classifier, each with its label."""

    tokens: _List
    labels: _List

    @pydantic.model_validator(mode="after")
    def _check_counts(self) -> LabelledTokens:
        if len(self.tokens) != len(self.labels):
            raise ValueError(f"it has {len(self.tokens)} tokens and {len(self.labels)} labels")
        return self

    def format_input(self) -> str:
        """Return the words."""
        return " ".join(self.tokens)

    def format_expected(self) -> str:
        """Return the labels."""
        return " ".join(self.labels)


class Asked(Record):
    """A question about a text, with every accepted answer."""

    question: _Words
    context: _Words
    answers: _List

    def format_input(self) -> str:
        """Return the question."""
        return self.question

    def format_expected(self) -> str:
        """Return the accepted answers."""
        return " | ".join(self.answers)


class Pair(Record):
    """Two texts with how alike they are, in any unit."""

    sentence1: _Words
    sentence2: _Words
    score: float

    def format_input(self) -> str:
        """Return both texts."""
        return f"{self.sentence1} | {self.sentence2}"

    def format_expected(self) -> str:
        """Return the score."""
        return repr(self.score)


FORMS: Mapping[str, tuple[type[Record], str]] = {
    DECODER.name: (Prompted, '{"prompt": "…", "expected": "…"}'),
    ENCODER_DECODER.name: (Translated, '{"source": "…", "target": "…"}'),
    **{each.name: (Transcribed, '{"audio": "clip.wav", "text": "…"}') for each in (SPEECH, RAW_SPEECH)},
    SEQUENCE_CLASSIFIER.name: (LabelledText, '{"text": "…", "label": "…"}'),
    TOKEN_CLASSIFIER.name: (LabelledTokens, '{"tokens": ["…"], "labels": ["…"]}'),
    QUESTION_ANSWERING.name: (Asked, '{"question": "…", "context": "…", "answers": ["…"]}'),
    FEATURE_EXTRACTION.name: (Pair, '{"sentence1": "…", "sentence2": "…", "score": 0.5}'),
}
"""By the name of the family: the kind of record, and how one is written."""


def read_records(folder: Path | None, inline: Sequence[Mapping[str, Any]], family: Family) -> tuple[Record, ...] | None:
    """Return the test inputs for a family; None if the family answers none.

    Args:
        folder: Folder with one file of records; None takes ``inline``.
        inline: Records of the configuration itself.
        family: The model's family.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: a file or record cannot be used.
    """
    if family.name not in FORMS:
        return None
    if folder is None and any(AUDIO in document for document in inline):
        raise _error("a list in the configuration names sounds", "write the list to a .jsonl file beside the sounds")
    documents: list[tuple[int, Any]] = (
        list(enumerate(inline, 1)) if folder is None else _documents(_file(folder), family)
    )
    if not documents or len(documents) > MOST_RECORDS:
        raise _error(f"they have {len(documents)} records", f"give 1 to {MOST_RECORDS}")
    return tuple(_record(document, number, family) for number, document in documents)


def choose_records(
    inputs: Mapping[str, Path],
    model: ModelConfig,
    family: Family,
    params: SampleParams,
    *,
    warn: Callable[[str], None] | None = None,
) -> tuple[Record, ...]:
    """Choose the test inputs that a validation answers; empty if there are none, or if models of the family answer none.

    Args:
        inputs: Inputs of the stage.
        model: The model's configuration.
        family: Its family.
        params: The stage's parameters.
        warn: Called with a warning if not all of them are answered.

    Raises:
        ValidationError: As :func:`read_records`.
    """
    if TEST_INPUTS not in inputs and not params.test_inputs:
        return ()
    records = read_records(inputs.get(TEST_INPUTS), params.test_inputs, family) or ()
    check_labels(records, model)
    most = min(params.most_test_inputs, MOST_SOUNDS) if family.takes_sound else params.most_test_inputs
    answered = records[:most]
    if warn is not None and len(answered) < len(records):
        warn(f"{len(answered)} of {len(records)} test inputs are answered: the first ones")
    return answered


def write_records(records: Sequence[Record], file: Path) -> Path | None:
    """Write records for the process that encodes them; return the file, None if there are none."""
    if not records:
        return None
    file.write_text(json.dumps([record.model_dump() for record in records]), encoding="utf-8")
    return file.absolute()


def check_labels(records: Sequence[Record], config: Mapping[str, Any]) -> None:
    """Refuse labels that a classifier does not have.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``.
    """
    labels = config.get("id2label")
    if not isinstance(labels, dict) or not labels:
        return
    known = {*map(str, labels), *map(str, labels.values())}
    for number, record in enumerate(records, 1):
        for label in _labels_of(record, regression=len(labels) == 1):
            if label not in known:
                names = ", ".join(map(str, list(labels.values())[:20]))
                raise _error(f"record {number}: the model has no label {quoted(label)}", f"its labels are {names}")


def _labels_of(record: Record, *, regression: bool) -> tuple[str, ...]:
    if isinstance(record, LabelledTokens):
        return record.labels
    if not isinstance(record, LabelledText):
        return ()
    if regression:
        if isinstance(record.label, int | float):
            return ()
        raise _error(
            f"the label {quoted(record.label)} is not a number", "the model gives a score: label texts with numbers"
        )
    return record.label if isinstance(record.label, tuple) else (str(record.label),)


def _file(folder: Path) -> Path:
    paths = files_of_test_inputs(folder)
    if len(paths) != 1:
        names = quoted([path.name for path in paths]) if paths else "none"
        raise _error(f"their folder has {names} of the kinds {', '.join(ENDINGS)}", "give exactly one")
    return paths[0]


def _documents(path: Path, family: Family) -> list[tuple[int, Any]]:
    """Return the records of a file with their numbers: lines of JSON, a list in JSON, or a prompt per line of text."""
    try:
        data = read_regular(path, largest=LARGEST)
        if path.suffix == ".json":
            value = parse_json(data, most_values=LARGEST_LIST // 16)
            return list(enumerate(value, 1)) if isinstance(value, list) else [(1, value)]
        lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
        if len(lines) > MOST_RECORDS:
            return lines  # refused by their number
        if path.suffix == ".txt":
            field = "source" if family is ENCODER_DECODER else "prompt"
            return [(number, {field: line.decode("utf-8")}) for number, line in lines]
        return [(number, _parse_line(line, number)) for number, line in lines]
    except (OSError, ValueError) as error:
        raise _error(f"{path.name} cannot be read: {error}", "save it as UTF-8, a JSON object per line") from error


def _parse_line(line: bytes, number: int) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _record(document: Any, number: int, family: Family) -> Record:
    kind, form = FORMS[family.name]
    try:
        return kind.model_validate(_to_tuples(document))
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        what = f"record {number}: {f'{place}: ' if place else ''}{fault['msg']}, it is {quoted(fault['input'])}"
        raise _error(what, f"for a {family.name} write it like {form}") from error


def _to_tuples(value: Any) -> Any:
    """Turn the lists of JSON data into tuples, which strict models take."""
    if isinstance(value, list | tuple):
        return tuple(_to_tuples(each) for each in value)
    return {key: _to_tuples(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _error(what: str, remedy: str) -> ValidationError:
    message = f"the test inputs cannot be used: {what}"
    return ValidationError(
        message, reason="VALIDATION_IMPOSSIBLE", remedy=remedy, about={"key": "validation.test_input_samples"}
    )
