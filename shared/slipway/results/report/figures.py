"""Format figures for people. A missing figure is a dash, never zero."""

from __future__ import annotations

import math

from slipway.results.result import FormatResult
from slipway.sizes import format_size
from slipway.validation.speed import Ratio, Speed

MISSING = "–"


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
