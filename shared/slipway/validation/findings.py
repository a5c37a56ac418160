"""What the validate stage finds out, as plain data: one reference, and one result per output compared with it.

``validation.json`` holds a :class:`ValidationReport`; the export's report, its HTML page and its model card are rendered
from it. Every figure says its unit in its name or docstring, a figure that was not taken is ``None``, and one that is not
a finite number (NaN, infinity) is ``None`` too and fails the check it belongs to.

Words used throughout: the *reference* is base + adapter, unmerged, in float32. The *merged* model is the output named
``pytorch``. A *window* is one sample of held-out text, ``sequence_length`` tokens long. Logits are compared at every
position of every window.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular

FILE_NAME = "validation.json"


class _Value(BaseModel):
    """Frozen plain data; keys of a newer version are ignored, so an older reader can show a newer report."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class OutputStatus(StrEnum):
    """How an output came out. ``NOT_RUN`` is neither passed nor failed: this machine cannot run it."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


class Check(_Value):
    """One measured value against one limit.

    Attributes:
        name: What was measured, for example ``mean_kl`` or ``left_padded.max_abs_diff``.
        value: The measurement; None when it is not a finite number (the check then fails).
        limit: What it may be at most (``<=``) or has to be at least (``>=``).
        comparison: Which of the two.
        passed: Whether the value keeps the limit.
        against: What the output was compared with: ``reference``, ``merged``, or ``itself`` (the same tokens computed
            another way, for example through the KV cache instead of in one pass).
        unit: Unit of value and limit: ``logits``, ``nats/token``, ``share`` (0 to 1), ``ratio`` or ``count``.
    """

    name: str
    value: float | None
    limit: float
    comparison: Literal["<=", ">="]
    passed: bool
    against: Literal["reference", "merged", "itself"] = "reference"
    unit: str = ""

    def __str__(self) -> str:
        shown = "not a finite number" if self.value is None else f"{self.value:.3g}"
        return f"{self.name} (against {self.against}) is {shown}, limit {self.comparison} {self.limit:.5g}"


class LogitComparison(_Value):
    """Logits of an output against those of another model, over all positions of all windows.

    Attributes:
        tokens: Positions compared.
        max_abs_diff: Largest absolute difference of a logit.
        mean_abs_diff: Mean absolute difference over all logits.
        mean_kl: Mean over positions of KL(other ‖ output) between next-token distributions, nats per token.
        max_kl: Largest of them.
        kl_quantiles: Quantiles of the per-position KL by name: ``p50``, ``p90``, ``p99``.
        kl_per_window: Mean KL of each window, in window order (for plots).
        top1_agreement: Share of positions where both rank the same token first, 0 to 1.
    """

    tokens: int
    max_abs_diff: float | None
    mean_abs_diff: float | None
    mean_kl: float | None
    max_kl: float | None
    kl_quantiles: dict[str, float | None] = {}
    kl_per_window: tuple[float | None, ...] = ()
    top1_agreement: float | None = None


class ShapeCase(_Value):
    """The same tokens computed in another shape, such as padded on the left or through the KV cache.

    Attributes:
        name: ``left_padded``, ``single_token``, ``decode`` (prefill, then one token at a time with the KV cache),
            ``decode_left_padded``, ``chunked`` (prefill, then several tokens at once), ``native_dtype`` (a padded batch
            in the data type it is served in, when logits are otherwise compared in float32).
        batch: Rows.
        tokens: Positions compared (padding left out).
        max_abs_diff: Against the reference's logits at the same positions.
        mean_kl: Against the reference, nats per token.
        self_max_abs_diff: Against the output's own logits of one plain pass over the window.
        self_mean_kl: Against the output's own, nats per token.
        skipped: Why the case does not apply to this output; empty when it ran.
    """

    name: str
    batch: int = 0
    tokens: int = 0
    max_abs_diff: float | None = None
    mean_kl: float | None = None
    self_max_abs_diff: float | None = None
    self_mean_kl: float | None = None
    skipped: str = ""


class GreedyComparison(_Value):
    """Greedy continuations (always the most likely token, with KV cache) against the reference's.

    Attributes:
        prompts: Prompts continued.
        new_tokens: Tokens generated for each.
        exact_match_share: Share of prompts whose whole continuation is the reference's, 0 to 1.
        mean_common_prefix: Mean number of tokens before the first difference.
        example_reference: Text of the first continuation by the reference.
        example_output: Text of the first continuation by this output.
    """

    prompts: int
    new_tokens: int
    exact_match_share: float
    mean_common_prefix: float
    example_prompt: str = ""
    example_reference: str = ""
    example_output: str = ""


MIN_STABLE_ROUNDS = 3
MAX_STABLE_SPREAD = 0.3


class Ratio(_Value):
    """How many times faster an output is than the reference: each of its rounds against the reference's beside it.

    Attributes:
        median: Over the rounds; above 1, the output is faster.
        range: From the 10th to the 90th percentile of the rounds; None of a single one.
        rounds: Pairs of rounds.
    """

    median: float
    range: tuple[float, float] | None = None
    rounds: int = 1

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def stable(self) -> bool:
        """Whether it can be relied on, by the rule for :class:`Speed`."""
        return _stable(_spread(self.median, self.range), self.rounds)


class Speed(_Value):
    """Speed of one output in its own process, batch 1, after a warm-up: medians over rounds, and how far the rounds scatter.

    A figure is *stable* when at least three rounds were taken and the range from the 10th to the 90th percentile of the rounds is at
    most 30 % of their median. One that is not says little: what else the machine did is in it.

    Attributes:
        threads: Threads the runtime may use.
        device: ``cpu``, or the GPU's name.
        dtype: Data type of the computation that was timed.
        prefill_tokens: Length of the prompt.
        rounds: Rounds taken; 1 for reports of versions that took one.
        interleaved: Whether the reference was timed in turn, round by round.
        prefill_ms: Time of one pass over the prompt, milliseconds (also the time to the first token); median of the rounds.
        prefill_ms_range: From the 10th to the 90th percentile of the rounds, milliseconds; None of a single one.
        prefill_speedup: Against the reference; None when it was not timed in turn.
        decode_tokens_per_second: Tokens per second, one at a time with the KV cache; median of the rounds.
        decode_range: From the 10th to the 90th percentile of the rounds, tokens per second; None of a single one.
        decode_speedup: Against the reference; None when it was not timed in turn.
        decode_ms_median: Time of one decode step, milliseconds, over all steps.
        decode_ms_p95: 95th percentile of it.
        repeats: Timed prefills of all rounds.
        decode_steps: Timed decode steps of all rounds.
        other_cores: Cores that other processes of the machine kept busy meanwhile; None when not known.
        note: Why there are fewer rounds than asked for, or why they were not interleaved; empty otherwise.
    """

    threads: int
    device: str
    dtype: str
    prefill_tokens: int
    rounds: int = 1
    interleaved: bool = False
    prefill_ms: float
    prefill_ms_range: tuple[float, float] | None = None
    prefill_speedup: Ratio | None = None
    decode_tokens_per_second: float | None = None
    decode_range: tuple[float, float] | None = None
    decode_speedup: Ratio | None = None
    decode_ms_median: float | None = None
    decode_ms_p95: float | None = None
    repeats: int = 0
    decode_steps: int = 0
    other_cores: float | None = None
    note: str = ""

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def prefill_stable(self) -> bool:
        """Whether the prefill figure can be relied on."""
        return _stable(self.prefill_spread, self.rounds)

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def decode_stable(self) -> bool:
        """Whether the decode figure can be relied on; false when there is none."""
        return _stable(self.decode_spread, self.rounds)

    @property
    def stable(self) -> bool:
        """Whether every figure that was taken can be relied on."""
        return self.prefill_stable and (self.decode_stable or self.decode_tokens_per_second is None)

    @property
    def prefill_spread(self) -> float | None:
        """Width of the range of prefill times, as a share of the median; None of a single round."""
        return _spread(self.prefill_ms, self.prefill_ms_range)

    @property
    def decode_spread(self) -> float | None:
        """Width of the range of decode speeds, as a share of the median; None of a single round."""
        return _spread(self.decode_tokens_per_second, self.decode_range)


def _stable(spread: float | None, rounds: int) -> bool:
    return rounds >= MIN_STABLE_ROUNDS and spread is not None and spread <= MAX_STABLE_SPREAD


def _spread(median: float | None, limits: tuple[float, float] | None) -> float | None:
    return (limits[1] - limits[0]) / median if median and limits else None


class Memory(_Value):
    """Memory of the output's own process, bytes.

    Attributes:
        peak_rss_bytes: Most resident memory it ever had, libraries and mapped weight files included.
        baseline_rss_bytes: Resident memory after the libraries were imported, before the model was loaded.
        peak_device_bytes: Most GPU memory, None without one.
    """

    peak_rss_bytes: int
    baseline_rss_bytes: int
    peak_device_bytes: int | None = None


class Engine(_Value):
    """What ran a model.

    Attributes:
        runtime: ``transformers``, ``onnxruntime`` or ``tensorrt``.
        version: Its version.
        provider: Execution provider or device.
        stored_dtype: Data type of the stored weights, the one that most bytes have (``bfloat16``, ``int4`` …).
        compute_dtype: Data type of the arithmetic behind the compared logits.
        native_dtype: Data type it computes in as it is served; speed and memory are measured in it.
    """

    runtime: str
    version: str = ""
    provider: str = "cpu"
    stored_dtype: str = ""
    compute_dtype: str = ""
    native_dtype: str = ""


class Limits(_Value):
    """What an output may differ by; see the table in ``slipway_validate.judging.limits`` for where the figures come from.

    Attributes:
        level: Row of the table they come from: ``float32``, ``bfloat16``, ``float16``, ``int8``, ``int4``.
        max_abs_diff: Largest difference of a logit, as a share of the reference's logit scale; None: not limited.
        mean_kl: Nats per token.
        top1_agreement: Least share of positions with the same first token.
        perplexity_ratio: Perplexity may be at most this multiple of the reference's.
        case_mean_kl: Mean KL of a shape case (few positions, so it scatters more).
        adapter_strength_error: How far the adapter's strength may be from 1.
    """

    level: str
    max_abs_diff: float | None
    mean_kl: float
    top1_agreement: float
    perplexity_ratio: float
    case_mean_kl: float
    adapter_strength_error: float


LIMIT_LEVELS = ("float32", "float16", "bfloat16", "int8", "int4")
"""Rows of the table of limits, from tightest to loosest: the types that weights are stored in."""


class LimitOverrides(BaseModel):
    """Limits that replace the table's for one level; None keeps the table's."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    max_abs_diff: float | None = Field(default=None, gt=0, description="share of the reference's logit scale")
    mean_kl: float | None = Field(default=None, gt=0, description="nats per token")
    top1_agreement: float | None = Field(default=None, ge=0, le=1, description="share of positions")
    perplexity_ratio: float | None = Field(default=None, ge=1)
    case_mean_kl: float | None = Field(default=None, gt=0, description="nats per token")
    adapter_strength_error: float | None = Field(default=None, gt=0, description="share of the adapter's effect")


class OutputValidation(_Value):
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
        to_reference: Logits against base + adapter.
        to_merged: Logits against the merged model; None for the merged model itself, or when it is no output.
        to_base: Logits against the base without adapter: an output close to this has lost the adapter.
        adapter_strength: Share of the adapter's effect on the logits that the output has: 1 is right, 0 is the base
            model; a scale wrong by a tenth moves it by about 0.05, rounding to 4 bits by less than 0.01.
        greedy: Greedy continuations against the reference's.
        perplexity: Perplexity on the windows, exp of the mean negative log-likelihood per token.
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


class ValidationInputs(_Value):
    """What every model was given.

    Attributes:
        samples: Windows of text.
        sequence_length: Tokens per window.
        tokens: Positions compared, samples × sequence_length.
        requested_samples: Windows asked for; fewer are used when the text is short or logits would not fit the disk.
        vocabulary: Size of the logits' last axis.
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
    seed: int
    prompts: int
    new_tokens: int
    text_source: str
    held_out: bool
    text_files: tuple[str, ...] = ()
    tokens_sha256: str = ""


class Reference(_Value):
    """The unmerged reference: base + adapter through peft, in float32.

    Attributes:
        description: In words, what it is and how it was computed.
        architecture: Class of the model.
        adapter: In words, the adapter's type, rank and alpha.
        engine: What ran it.
        perplexity: On the windows.
        base_perplexity: The base model's without the adapter, on the same windows.
        gain_per_window: Nats per token that the adapter saves in each window: the base's mean negative log-likelihood minus the
            reference's. Its spread tells a helpful adapter from noise (``slipway.base_match.measurement``).
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
    logit_scale: float = 1.0
    arithmetic_noise: float | None = None
    memory: Memory | None = None
    load_seconds: float | None = None
    speed: Speed | None = None


class ValidationReport(_Value):
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
