"""The results of the validate stage, as plain data: one reference, and one result per output compared with it.

``validation.json`` holds a :class:`ValidationReport`; the export's report, its HTML page and its model card are rendered
from it. Each figure has its unit in its name or docstring. A figure that was not taken is ``None``. One that is not a finite number
(NaN, infinity) is ``None`` too, and its check fails.

The *reference* is base + adapter, unmerged, in float32, or the base itself if an export starts from a plain model. The *merged* model
is the output named ``pytorch``. A *window* is one sample of held-out text, ``sequence_length`` tokens long. The model's *family*
decides which results are compared: logits at every position of every window for a decoder, the classes of each window for a classifier.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import computed_field

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway.validation.answers import AnswerComparison, LongContinuation
from slipway.validation.comparisons import Check, GreedyComparison, LogitComparison, ShapeCase
from slipway.validation.parts import MissingPart, MultiTokenHead, Routing
from slipway.validation.pictures import PictureComparison, PictureEffect
from slipway.validation.speed import Engine, Machine, Memory, Speed
from slipway.validation.survival import AdapterSurvival
from slipway.validation.texts import TextComparison
from slipway.validation.verdicts import Limits, Value, Verdict

FILE_NAME = "validation.json"


REJECTED, TOO_COARSE = "VALIDATION_FAILED", "TOO_COARSE"
"""Reasons for which an output is made again: it failed, or passed with a warning."""


def failure_prefix(name: str) -> str:
    """Return the start of every message about a failed output; such warnings are withdrawn when the output is made again."""
    return f"{name} failed validation: "


def warning_prefix(name: str) -> str:
    """Return the start of a message about an output that passed, but keeps less of the fine-tune than it should."""
    return f"{name} passed with a warning: "


class OutputStatus(StrEnum):
    """The verdict on an output. ``NOT_RUN`` is neither passed nor failed: this machine cannot run it."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


class OutputValidation(Value):
    """The comparison of one output with the reference.

    Attributes:
        name: Name of the output: ``pytorch``, ``pytorch-int4``, ``onnx``, ``tensorrt`` …
        format: ``pytorch``, ``onnx``, ``tensorrt``.
        level: Quantization level, ``none`` for an unquantized output.
        status: Passed, failed, or not run on this machine.
        status_reason: Why it was not run; or the reason (a key of ``slipway.reasons.REASONS``) of a failure to load
            or run it. Empty if it ran.
        size_bytes: Size of all files of the output.
        engine: The runtime that ran it; None if it could not be started.
        to_reference: Results compared with the reference.
        to_merged: Logits compared with the merged model; None for the merged model itself, or if it is not an output.
        to_stored: Results compared with PyTorch on the weights that the output stores, over some of the windows; None if they were not read.
        to_base: Results compared with the base without adapter; an output close to the base has lost the adapter. None without an adapter.
        adapter_strength: Share of the adapter's effect on the logits that the output shows: 1 is right, 0 is the base
            model; a scale wrong by a tenth changes it by about 0.05, rounding to 4 bits by less than 0.01.
        greedy: Greedy continuations compared with the reference's.
        continuation: Long ones; None if none were asked for.
        answers: Answers to the user's test inputs beside the reference's; None if there are none.
        texts: How its runtime reads texts and conversations, compared with transformers; None if it reads none itself.
        perplexity: Perplexity on the windows, exp of the mean negative log-likelihood per predicted token; None if the model predicts
            no tokens.
        reference_perplexity: Perplexity of the reference on the same tokens.
        cases: The same tokens in other shapes.
        survival: What its stored weights hold of the adapter, module by module; None without an adapter, or if nothing was compared.
        routing: How often it chooses the experts of the reference; None unless both are mixtures whose choices were recorded.
        pictures: Its results behind pictures; None for a model that takes none.
        sound: Its results behind sound; None for a model that takes none beside text.
        missing: Parts of the base (heads that predict further tokens, parts for images and sound) of which its files lack tensors.
        speed: Measured speed; None if not benchmarked.
        memory: Memory of the output's own process.
        load_seconds: Time to load the model, seconds. An upper bound: other outputs are judged, and their libraries imported, meanwhile.
        faithful: Whether it computes what its own weights say.
        fit: Whether enough of the fine-tune is left.
        kept: Share of the fine-tune that is left, 0 to 1; None without an adapter, or if that was not measured.
        level_cost: Distance from the reference of the same merged weights rounded to the nearest of this level, as ``to_reference`` measures it;
            None if that is not known.
        limits: Absolute limits.
        checks: All checks, passed or not.
        explanation: The failed checks, by how much they failed, and the likely cause. Empty if passed.
        remedy: What to change. Empty if passed.
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
    to_stored: LogitComparison | None = None
    to_base: LogitComparison | None = None
    adapter_strength: float | None = None
    greedy: GreedyComparison | None = None
    continuation: LongContinuation | None = None
    answers: AnswerComparison | None = None
    texts: TextComparison | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    cases: tuple[ShapeCase, ...] = ()
    survival: AdapterSurvival | None = None
    routing: Routing | None = None
    pictures: PictureComparison | None = None
    sound: PictureComparison | None = None
    missing: tuple[MissingPart, ...] = ()
    speed: Speed | None = None
    memory: Memory | None = None
    load_seconds: float | None = None
    faithful: Verdict = Verdict()
    fit: Verdict = Verdict()
    kept: float | None = None
    level_cost: float | None = None
    limits: Limits | None = None
    checks: tuple[Check, ...] = ()
    explanation: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def passed(self) -> bool:
        """Return whether the output ran and kept every limit."""
        return self.status is OutputStatus.PASSED

    @property
    def failed_checks(self) -> tuple[Check, ...]:
        """Return the checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


class ValidationInputs(Value):
    """The inputs given to every model.

    Attributes:
        samples: Number of windows of text.
        sequence_length: Tokens per window.
        tokens: Number of compared positions, samples × sequence_length.
        requested_samples: Requested number of windows; fewer are used if the text is short or the logits would not fit on the disk.
        vocabulary: Number of values in one result: the vocabulary's size, the number of classes.
        family: Kind of model: ``decoder``, ``encoder-decoder``, ``sequence classifier`` … (``slipway.model.families``).
        comparison: How two models of the family are compared: ``next token``, ``teacher forced``, ``classes`` …
        seed: Seed that placed the windows in the text.
        prompts: Number of prompts that were continued greedily.
        new_tokens: Number of tokens generated for each.
        text_source: Origin of the text, in words.
        held_out: Whether the text was given as held-out text; otherwise it is the built-in text, which the model may
            have seen in training, so that its perplexity does not measure quality.
        text_files: Used files, in order.
        tokens_sha256: SHA-256 of the token ids (int64, little endian) of all windows.
        effort: How much evidence was gathered (``slipway.validation.inputs``).
        effort_difference: What differs from the full evidence, in words; empty for the full evidence.
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
    effort: str = "standard"
    effort_difference: str = ""


class AdapterEvidence(Value):
    """What the adapter does on one text like that of its training.

    Attributes:
        text: What the text is, in words.
        perplexity: Perplexity of base + adapter.
        base_perplexity: Perplexity of the base alone.
        gain_per_window: As that of :class:`Reference`, of each document.
        labels: For a classifier: number of labels.
        correct: How many of them base + adapter finds.
        commonest: How many are the commonest label, which a guess would find.
    """

    text: str
    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    labels: int = 0
    correct: int = 0
    commonest: int = 0


class Reference(Value):
    """The reference: base + adapter through peft, unmerged, in float32; the base alone if there is no adapter.

    Attributes:
        description: Description of the reference and its computation, in words.
        architecture: Class of the model.
        adapter: The adapter's type, rank and alpha, in words; empty without one.
        engine: The runtime that ran it.
        perplexity: Perplexity on the windows.
        base_perplexity: Perplexity of the base model without the adapter, on the same windows.
        gain_per_window: Nats per token that the adapter saves in each window: the base's mean negative log-likelihood minus the
            reference's. Its spread tells a helpful adapter from noise (``slipway.base_match.match``).
        evidence: What the adapter does on text like that of its training: beside the run, and the user's test inputs.
        multi_token_head: How often the model accepts what its multi-token head drafts; None if it has no such head.
        routing: How often the base chooses the experts of base + adapter; None without an adapter, or for a model without experts.
        pictures: What it computes of prompts with a picture; None for a model that takes none.
        sound: What it computes of prompts with sound; None for a model that takes none beside text.
        adapter_effect_error: Relative error of the base against the reference, for values that are not logits.
        adapter_effect_kl: Mean KL(reference ‖ base), nats per token: the adapter's effect on this text. An output has lost the
            training if its distance to the reference is not small compared with this.
        logit_scale: Root mean square of the reference's logits, at least 1; limits for differences are relative to it.
        arithmetic_noise: Largest difference between the reference's own logits for the same tokens through the KV
            cache and in one pass: the effect of float32 rounding alone on this model.
        memory: Memory of the reference's process.
        load_seconds: Time to load base and adapter, seconds.
        speed: Measured speed; None if not benchmarked.
    """

    description: str
    architecture: str = ""
    adapter: str = ""
    engine: Engine
    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    evidence: tuple[AdapterEvidence, ...] = ()
    multi_token_head: MultiTokenHead | None = None
    routing: Routing | None = None
    pictures: PictureEffect | None = None
    sound: PictureEffect | None = None
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
        reference: The reference of all comparisons.
        inputs: The inputs given to every model.
        outputs: One result per output, sorted by name.
        warnings: Warnings about the validation as a whole.
        seconds: Wall-clock time of the validation.
        machine: The machine that ran it, and on which speeds were measured; None in reports of versions that did not say.
    """

    schema_version: Literal[1] = 1
    reference: Reference
    inputs: ValidationInputs
    outputs: tuple[OutputValidation, ...]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    machine: Machine | None = None

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def passed(self) -> bool:
        """Return whether at least one output passed and none failed; outputs that were not run do not count."""
        statuses = [output.status for output in self.outputs]
        return OutputStatus.PASSED in statuses and OutputStatus.FAILED not in statuses

    @property
    def failed_outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that failed."""
        return self._named(OutputStatus.FAILED)

    @property
    def not_run_outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that this machine could not run."""
        return self._named(OutputStatus.NOT_RUN)

    def output(self, name: str) -> OutputValidation:
        """Return the result of one output.

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
        """Read the report in a ``validation`` folder.

        Raises:
            OSError: The folder has no ``validation.json``, or it is not a regular file of a sensible size.
            pydantic.ValidationError: The file is not a report of this schema.
        """
        return cls.model_validate_json(read_regular(folder / FILE_NAME, largest=LARGEST_LIST))

    def _named(self, status: OutputStatus) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs if output.status is status)
