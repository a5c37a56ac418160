"""What a run costs: time and memory, and what ran it."""

from __future__ import annotations

from pydantic import computed_field

from slipway.validation.values import Value

MIN_STABLE_ROUNDS = 3
MAX_STABLE_SPREAD = 0.3


class Ratio(Value):
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


class Speed(Value):
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


class Memory(Value):
    """Memory of the output's own process, bytes.

    Attributes:
        peak_rss_bytes: Most resident memory it ever had, libraries and mapped weight files included.
        baseline_rss_bytes: Resident memory after the libraries were imported, before the model was loaded.
        peak_device_bytes: Most GPU memory, None without one.
    """

    peak_rss_bytes: int
    baseline_rss_bytes: int
    peak_device_bytes: int | None = None


class Engine(Value):
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
