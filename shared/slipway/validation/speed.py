"""Time and memory of a run, and the runtime that ran it."""

from __future__ import annotations

from pydantic import computed_field

from slipway.sizes import format_size
from slipway.texts import counted
from slipway.validation.verdicts import Value

MIN_STABLE_ROUNDS = 3
MAX_STABLE_SPREAD = 0.3


class Ratio(Value):
    """Speed of an output as a multiple of the reference's, from rounds of both in turn.

    Attributes:
        median: Median over the rounds; above 1, the output is faster.
        range: 10th and 90th percentile of the rounds; None for a single round.
        rounds: Number of pairs of rounds.
    """

    median: float
    range: tuple[float, float] | None = None
    rounds: int = 1

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def stable(self) -> bool:
        """Return whether the ratio is reliable, by the rule for :class:`Speed`."""
        return _stable(_spread(self.median, self.range), self.rounds)


class Machine(Value):
    """The machine on which speeds were measured.

    Attributes:
        processor: Name of the CPU.
        cores: CPU cores that the process may use.
        memory_bytes: Memory that it may use.
        platform: Operating system and architecture.
    """

    processor: str
    cores: int
    memory_bytes: int
    platform: str

    @property
    def said(self) -> str:
        """Return all of it in words."""
        return f"{self.processor}, {counted(self.cores, 'core')}, {format_size(self.memory_bytes)} of memory, {self.platform}"


class Speed(Value):
    """Speed of one output in its own process, batch 1, after a warm-up: medians over rounds, and the scatter of the rounds.

    A figure is *stable* if at least three rounds were taken and the range from the 10th to the 90th percentile of the rounds is at
    most 30 % of their median. An unstable figure says little, because it also measures other load on the machine.

    Attributes:
        threads: Number of threads that the runtime may use.
        device: ``cpu``, or the GPU's name.
        dtype: Data type of the timed computation.
        prefill_tokens: Length of the prompt.
        rounds: Number of rounds; 1 in reports of versions that took one.
        interleaved: Whether the reference was timed in turn, round by round.
        prefill_ms: Time of one pass over the prompt, milliseconds (also the time to the first token); median of the rounds.
        prefill_ms_range: 10th and 90th percentile of the rounds, milliseconds; None for a single round.
        prefill_speedup: Speed as a multiple of the reference's; None if it was not timed in turn.
        decode_tokens_per_second: Tokens per second, one at a time with the KV cache; median of the rounds.
        decode_range: 10th and 90th percentile of the rounds, tokens per second; None for a single round.
        decode_speedup: Speed as a multiple of the reference's; None if it was not timed in turn.
        decode_ms_median: Median time of one decode step, milliseconds, over all steps.
        decode_ms_p95: 95th percentile of the time of one decode step.
        repeats: Number of timed prefills in all rounds.
        decode_steps: Number of timed decode steps in all rounds.
        other_cores: Number of cores that other processes of the machine used meanwhile; None if unknown.
        note: Why there are fewer rounds than requested, or why they were not interleaved; empty otherwise.
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
        """Return whether the prefill figure is reliable."""
        return _stable(self.prefill_spread, self.rounds)

    @computed_field  # type: ignore[prop-decorator] # as above
    @property
    def decode_stable(self) -> bool:
        """Return whether the decode figure is reliable; false if there is none."""
        return _stable(self.decode_spread, self.rounds)

    @property
    def stable(self) -> bool:
        """Return whether every measured figure is reliable."""
        return self.prefill_stable and (self.decode_stable or self.decode_tokens_per_second is None)

    @property
    def prefill_spread(self) -> float | None:
        """Return the width of the range of prefill times, as a share of the median; None for a single round."""
        return _spread(self.prefill_ms, self.prefill_ms_range)

    @property
    def decode_spread(self) -> float | None:
        """Return the width of the range of decode speeds, as a share of the median; None for a single round."""
        return _spread(self.decode_tokens_per_second, self.decode_range)


def _stable(spread: float | None, rounds: int) -> bool:
    return rounds >= MIN_STABLE_ROUNDS and spread is not None and spread <= MAX_STABLE_SPREAD


def _spread(median: float | None, limits: tuple[float, float] | None) -> float | None:
    return (limits[1] - limits[0]) / median if median and limits else None


class Memory(Value):
    """Memory of the output's own process, bytes.

    Attributes:
        peak_rss_bytes: Peak resident memory, including libraries and mapped weight files.
        baseline_rss_bytes: Resident memory after the libraries were imported, before the model was loaded.
        peak_device_bytes: Peak GPU memory; None without a GPU.
    """

    peak_rss_bytes: int
    baseline_rss_bytes: int
    peak_device_bytes: int | None = None


class Engine(Value):
    """The runtime that ran a model, and its data types.

    Attributes:
        runtime: ``transformers``, ``onnxruntime`` or ``tensorrt``.
        version: Its version.
        provider: Execution provider or device.
        stored_dtype: Data type of most bytes of the stored weights (``bfloat16``, ``int4`` …).
        compute_dtype: Data type in which the compared logits were computed.
        native_dtype: Data type in which the output computes when it is served; speed and memory are measured in it.
    """

    runtime: str
    version: str = ""
    provider: str = "cpu"
    stored_dtype: str = ""
    compute_dtype: str = ""
    native_dtype: str = ""
