"""What the validate stage finds out, as plain data: one reference, and one result per output compared with it.

``validation.json`` holds a :class:`ValidationReport`; the export's report, its HTML page and its model card are rendered
from it. Every figure says its unit in its name or docstring, a figure that was not taken is ``None``, and one that is not
a finite number (NaN, infinity) is ``None`` too and fails the check it belongs to.

Words used throughout: the *reference* is base + adapter, unmerged, in float32, or the base itself where an export starts from a plain
model. The *merged* model is the output named ``pytorch``. A *window* is one sample of held-out text, ``sequence_length`` tokens long.
What is compared depends on the model's *family*: logits at every position of every window for a decoder, the classes of each window for a
classifier.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import computed_field

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway.validation.comparisons import Check, GreedyComparison, LogitComparison, ShapeCase
from slipway.validation.limits import Limits
from slipway.validation.speed import Engine, Memory, Speed
from slipway.validation.values import Value

FILE_NAME = "validation.json"


class OutputStatus(StrEnum):
    """How an output came out. ``NOT_RUN`` is neither passed nor failed: this machine cannot run it."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


class OutputValidation(Value):
    """How one output compares with the reference.

    Attributes:
        name: Name of the output: ``pytorch``, ``pytorch-int4``, ``onnx``, ``tensorrt`` …
        format: ``pytorch``, ``onnx``, ``tensorrt``.
        level: Quantization level, ``none`` for an unquantized output.
        status: Passed, failed, or not run on this machine.
        status_reason: Why it was not run; or the reason (a key of ``slipway.reasons.REASONS``) of a failure to load
            or run it. Empty when it ran.
        size_bytes: Bytes of all files of the output.
        engine: What ran it; None when it could not be started.
        to_reference: Results against the reference.
        to_merged: Logits against the merged model; None for the merged model itself, or when it is no output.
        to_base: Results against the base without adapter: an output close to this has lost the adapter. None without an adapter.
        adapter_strength: Share of the adapter's effect on the logits that the output has: 1 is right, 0 is the base
            model; a scale wrong by a tenth moves it by about 0.05, rounding to 4 bits by less than 0.01.
        greedy: Greedy continuations against the reference's.
        perplexity: Perplexity on the windows, exp of the mean negative log-likelihood per predicted token; None where none is
            predicted.
        reference_perplexity: The reference's, on the same tokens.
        cases: The same tokens in other shapes.
        speed: None when not benchmarked.
        memory: Of the output's own process.
        load_seconds: Time to load the model, seconds.
        limits: Limits against the reference.
        checks: Every check made, passed or not.
        explanation: Which checks failed, by how much, and the likely cause. Empty when passed.
        remedy: What to change. Empty when passed.
        notes: Remarks that do not change the verdict.
    """

    name: str
    format: str
    level: str = "none"
    status: OutputStatus
    status_reason: str = ""
    size_bytes: int = 0
    engine: Engine | None = None
    to_reference: LogitComparison | None = None
    to_merged: LogitComparison | None = None
    to_base: LogitComparison | None = None
    adapter_strength: float | None = None
    greedy: GreedyComparison | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    cases: tuple[ShapeCase, ...] = ()
    speed: Speed | None = None
    memory: Memory | None = None
    load_seconds: float | None = None
    limits: Limits | None = None
    checks: tuple[Check, ...] = ()
    explanation: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def passed(self) -> bool:
        """Whether it ran and kept every limit."""
        return self.status is OutputStatus.PASSED

    @property
    def failed_checks(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


class ValidationInputs(Value):
    """What every model was given.

    Attributes:
        samples: Windows of text.
        sequence_length: Tokens per window.
        tokens: Positions compared, samples × sequence_length.
        requested_samples: Windows asked for; fewer are used when the text is short or logits would not fit the disk.
        vocabulary: Values of one result: the vocabulary's size, the number of classes.
        family: Kind of model: ``decoder``, ``encoder-decoder``, ``sequence classifier`` … (``slipway.models.families``).
        comparison: How two models of it are compared: ``next token``, ``teacher forced``, ``classes`` …
        seed: Seed that placed the windows in the text.
        prompts: Prompts continued greedily.
        new_tokens: Tokens generated for each.
        text_source: In words, where the text comes from.
        held_out: Whether the text was given as held-out text; otherwise it is the built-in one, which the model may
            have seen in training, so that its perplexity is no measure of quality.
        text_files: Files used, in order.
        tokens_sha256: SHA-256 over the token ids (int64, little endian) of all windows.
    """

    samples: int
    sequence_length: int
    tokens: int
    requested_samples: int
    vocabulary: int
    family: str = "decoder"
    comparison: str = "next token"
    seed: int
    prompts: int
    new_tokens: int
    text_source: str
    held_out: bool
    text_files: tuple[str, ...] = ()
    tokens_sha256: str = ""


class Reference(Value):
    """The reference: base + adapter through peft, unmerged, in float32; the base alone where there is no adapter.

    Attributes:
        description: In words, what it is and how it was computed.
        architecture: Class of the model.
        adapter: In words, the adapter's type, rank and alpha; empty without one.
        engine: What ran it.
        perplexity: On the windows.
        base_perplexity: The base model's without the adapter, on the same windows.
        gain_per_window: Nats per token that the adapter saves in each window: the base's mean negative log-likelihood minus the
            reference's. Its spread tells a helpful adapter from noise (``slipway.base_match.measurement``).
        adapter_effect_error: Of values that are no logits, the base's relative error against the reference.
        adapter_effect_kl: Mean KL(reference ‖ base), nats per token: how much the adapter matters on this text. An
            output whose distance to the reference is not small against this has lost what was trained.
        logit_scale: Root mean square of the reference's logits, at least 1: differences are limited relative to it.
        arithmetic_noise: Largest difference between the reference's own logits for the same tokens through the KV
            cache and in one pass: what float32 rounding alone does to this model.
        memory: Of the reference's process.
        load_seconds: Time to load base and adapter, seconds.
        speed: None when not benchmarked.
    """

    description: str
    architecture: str = ""
    adapter: str = ""
    engine: Engine
    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    adapter_effect_kl: float | None = None
    adapter_effect_error: float | None = None
    logit_scale: float = 1.0
    arithmetic_noise: float | None = None
    memory: Memory | None = None
    load_seconds: float | None = None
    speed: Speed | None = None


class ValidationReport(Value):
    """The result of one validation.

    Attributes:
        schema_version: Raised when a field changes its meaning.
        reference: What everything was compared with.
        inputs: What every model was given.
        outputs: One result per output, in order of name.
        warnings: What the user should know about the validation as a whole.
        seconds: Wall-clock time of the validation.
    """

    schema_version: Literal[1] = 1
    reference: Reference
    inputs: ValidationInputs
    outputs: tuple[OutputValidation, ...]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def passed(self) -> bool:
        """Whether at least one output passed and none failed; outputs that were not run prove nothing either way."""
        statuses = [output.status for output in self.outputs]
        return OutputStatus.PASSED in statuses and OutputStatus.FAILED not in statuses

    @property
    def failed_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that failed."""
        return self._named(OutputStatus.FAILED)

    @property
    def not_run_outputs(self) -> tuple[str, ...]:
        """Names of the outputs this machine could not run."""
        return self._named(OutputStatus.NOT_RUN)

    def output(self, name: str) -> OutputValidation:
        """The result of one output.

        Raises:
            KeyError: There is no output of this name.
        """
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(name)

    def write(self, folder: Path) -> Path:
        """Write ``validation.json`` into a folder and return its path."""
        path = folder / FILE_NAME
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, folder: Path) -> ValidationReport:
        """The report in a ``validation`` folder.

        Raises:
            OSError: The folder has no ``validation.json``, or it is no regular file of a sensible size.
            pydantic.ValidationError: The file is no report of this schema.
        """
        return cls.model_validate_json(read_regular(folder / FILE_NAME, largest=LARGEST_LIST))

    def _named(self, status: OutputStatus) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs if output.status is status)
