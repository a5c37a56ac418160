"""Format figures of a report for people, and choose the words and figures that describe a comparison.

A missing figure is a dash, never zero. Words and figures of a comparison depend on the models' family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slipway.results.result import FormatResult
from slipway.sizes import format_size
from slipway.validation.findings import ValidationReport
from slipway.validation.speed import Ratio, Speed

MISSING = "–"

_COMPARISON_WORDS: Mapping[str, tuple[str, str, str]] = {
    "next token": ("next-token distributions", "token", "Top-1 agreement"),
    "teacher forced": ("distributions of the tokens of given labels", "token", "Top-1 agreement"),
    "classes": ("distributions of classes", "result", "Class agreement"),
    "spans": ("distributions of where answers start and end", "result", "Place agreement"),
    "masked tokens": ("distributions of masked tokens", "token", "Top-1 agreement"),
    "embeddings": ("embeddings", "result", "Cosine distance"),
}
"""By comparison (``slipway.model.families``): the compared results, the unit per which nats are counted, and the name of the agreement."""
_GENERATING = ("next token", "teacher forced")
"""Comparisons of models that write text."""


def size(count: float | None) -> str:
    """Format bytes in decimal units: ``12.6 MB``."""
    return MISSING if count is None else format_size(count)


def small(value: float | None) -> str:
    """Format a difference or divergence with two digits, in scientific notation below 0.001."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.2g}"


def share(value: float | None) -> str:
    """Format a share from 0 to 1 as percent."""
    return MISSING if value is None else f"{100 * value:.2f} %"


def percent(value: float | None) -> str:
    """Format a figure that is already in percent."""
    return MISSING if value is None else f"{value:.1f} %"


def milliseconds(value: float | None) -> str:
    """Format milliseconds with three digits."""
    return MISSING if value is None else f"{_digits(value)} ms"


def rate(value: float | None) -> str:
    """Format tokens per second."""
    return MISSING if value is None else f"{_digits(value)} tok/s"


def prompt_speed(entry: FormatResult) -> str:
    """Format the time of one pass over a prompt with its scatter: ``5.03 ms ±4 %``."""
    figure = milliseconds(entry.inference_speed_ms)
    return add_scatter(figure, entry.inference_speed_spread_percent, stable=entry.inference_speed_stable)


def generation_speed(entry: FormatResult) -> str:
    """Format the speed of generation with its scatter: ``25 tok/s ±60 %, unstable``."""
    figure = rate(entry.decode_tokens_per_second)
    return add_scatter(figure, entry.decode_spread_percent, stable=entry.decode_stable)


def pass_time(speed: Speed | None) -> str:
    """Format the time of one pass over an input with its scatter."""
    if speed is None:
        return MISSING
    return add_scatter(milliseconds(speed.prefill_ms), _percent(speed.prefill_spread), stable=speed.prefill_stable)


def decode_rate(speed: Speed | None) -> str:
    """Format the speed of generation with its scatter."""
    if speed is None:
        return MISSING
    return add_scatter(rate(speed.decode_tokens_per_second), _percent(speed.decode_spread), stable=speed.decode_stable)


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def add_scatter(figure: str, spread: float | None, *, stable: bool) -> str:
    """Add the scatter to a median, as half the width of the range of most rounds, and mark an unstable figure.

    Args:
        figure: The formatted median.
        spread: Width of the range, in percent of the median; None for a single round.
        stable: Whether the figure is reliable.
    """
    if figure == MISSING:
        return figure
    if spread is None:
        return f"{figure}, one round"
    half = f"{spread / 2:.0f}" if spread >= 2 else f"{spread / 2:.1g}"
    return f"{figure} ±{half} %" + ("" if stable else ", unstable")


def times(value: Ratio | None) -> str:
    """Format the speed as a multiple of the reference's, with the range of most rounds: ``1.8 times (1.7 to 1.9)``."""
    if value is None:
        return MISSING
    limits = f" ({_digits(value.range[0])} to {_digits(value.range[1])})" if value.range else ""
    return f"{_digits(value.median)} times{limits}" + ("" if value.stable else ", unstable")


def number(value: float | None) -> str:
    """Format any other figure with three digits."""
    return MISSING if value is None or not math.isfinite(value) else _digits(value)


def duration(seconds: float | None) -> str:
    """Format a duration: ``0.42 s``, ``3 min 5 s``."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a :class:`~slipway.validation.comparisons.LogitComparison`.

    Attributes:
        heading: Heading of its column.
        name: Name of the attribute.
        form: Filter that formats it: ``small`` or ``share``.
    """

    heading: str
    name: str
    form: str = "small"


@dataclass(frozen=True, slots=True)
class Compared:
    """The words and figures of a comparison.

    Attributes:
        what: The compared results, in words.
        distance: The figure for the distance between models.
        distance_words: The same figure in a sentence, with its unit.
        agreement: The figure for the agreement of models.
        more: Further figures.
        generates: Whether the models write text token by token: then generation speed is compared, otherwise the time per text.
    """

    what: str
    distance: Figure
    distance_words: str
    agreement: Figure
    more: tuple[Figure, ...]
    generates: bool = True

    def speeds(self, speed: Speed | None, *, baseline: bool = False) -> list[tuple[str, str]]:
        """Return headings and cells for the speed of an output, or of the reference itself, which PyTorch runs eagerly."""
        cells = [("Prompt" if self.generates else "Per text", pass_time(speed))]
        ratio = speed.prefill_speedup if speed else None
        if self.generates:
            cells.append(("Generation", decode_rate(speed)))
            ratio = speed.decode_speedup if speed else None
        return [*cells, ("Against PyTorch", "1" if baseline else times(ratio))]

    @property
    def title(self) -> str:
        """Return the title of a chart of the distance."""
        return "Mean KL divergence" if self.distance.name == "mean_kl" else self.distance.heading

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Return all figures, in the order of a table."""
        return (self.distance, *self.more[:1], self.agreement, *self.more[1:])


_DIFFERENCES = (Figure("Largest difference", "max_abs_diff"), Figure("Mean difference", "mean_abs_diff"))


def describe_comparison(report: ValidationReport | None) -> Compared:
    """Return the words and figures for a validation; without one, those of a decoder."""
    comparison = report.inputs.comparison if report else "next token"
    generates = comparison in _GENERATING
    what, unit, agreement = _COMPARISON_WORDS.get(comparison, _COMPARISON_WORDS["next token"])
    comparisons = [output.to_reference for output in report.outputs if output.to_reference] if report else []
    if comparison == "embeddings" or any(each.relative_error is not None for each in comparisons):
        return Compared(
            what=what if comparison == "embeddings" else "scores",
            distance=Figure("Relative error", "relative_error"),
            distance_words="Relative error",
            agreement=Figure("Cosine distance", "cosine_distance"),
            more=(Figure("Largest cosine distance", "max_cosine_distance"), *_DIFFERENCES),
            generates=generates,
        )
    return Compared(
        what=what,
        distance=Figure("Mean KL", "mean_kl"),
        distance_words=f"KL divergence (nats per {unit})",
        agreement=Figure(agreement, "top1_agreement", "share"),
        more=(Figure("Largest KL", "max_kl"), *_DIFFERENCES),
        generates=generates,
    )
