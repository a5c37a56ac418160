"""The words and figures with which a report describes a comparison, depending on the models' family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipway.results.report import figures
from slipway.validation.findings import ValidationReport
from slipway.validation.speed import Speed

_WORDS: Mapping[str, tuple[str, str, str]] = {
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
        cells = [("Prompt" if self.generates else "Per text", figures.pass_time(speed))]
        ratio = speed.prefill_speedup if speed else None
        if self.generates:
            cells.append(("Generation", figures.decode_rate(speed)))
            ratio = speed.decode_speedup if speed else None
        return [*cells, ("Against PyTorch", "1" if baseline else figures.times(ratio))]

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
    what, unit, agreement = _WORDS.get(comparison, _WORDS["next token"])
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
