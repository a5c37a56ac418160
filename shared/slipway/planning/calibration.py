"""Plan the calibration of integer levels: one task that chooses the text, and one for each level that its formats share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import (
    AUTO,
    WITHOUT_DATA,
    calibrated_levels,
    depends_on_text,
    may_read_text,
    reserve_levels,
    with_method,
)
from slipway.errors import QuantizationError
from slipway.formats.contract import Format
from slipway.formats.tasks import PlannedTask
from slipway.levels import LEVELS, bits_of, widths_of
from slipway.registry import stage_of
from slipway.stage import Role
from slipway.validation.inputs import HELDOUT

WIDEST = max(each.bits or 0 for each in LEVELS.values())
"""Bits at which zero points gain nothing."""
SOURCE = "calibration"
"""Name of the source with the user's text."""
_FALLBACK = "integer weights are rounded to the nearest, without data"


def names_calibration(configuration: ExportConfiguration) -> bool:
    """Return whether the settings name text that the export uses."""
    return bool(configuration.optimization.calibration) and may_read_text(configuration)


def check_texts_apart(configuration: ExportConfiguration, sources: Mapping[str, str]) -> None:
    """Refuse an export whose text for calibration is its held-out text, where it cannot go on without the first.

    Args:
        configuration: Settings of the export.
        sources: Digests or addresses of the sources, by name.

    Raises:
        QuantizationError: ``CALIBRATION_OVERLAP``.
    """
    text, judged = sources.get(SOURCE), sources.get(HELDOUT) if configuration.validation.enabled else None
    if text and text == judged and depends_on_text(with_method(configuration, has_text=True)):
        raise same_text_error(text)


def same_text_error(name: str) -> QuantizationError:
    """Return the error of one text that is both text for calibration and held-out text."""
    return QuantizationError(
        f"optimization.calibration and validation.heldout are the same text ({name}): a level that was fitted to the held-out text "
        "proves nothing on it",
        reason="CALIBRATION_OVERLAP",
        remedy="hold other text out, or leave validation.heldout out to use the built-in text",
        about={"key": "validation.heldout"},
    )


def is_symmetric(configuration: ExportConfiguration, each: Format) -> bool:
    """Return whether the calibrated integers of a format have no zero points."""
    optimization = configuration.optimization
    mixed = bool(optimization.size_budget or optimization.wide_share)
    return optimization.symmetric or (mixed and not each.zero_points)


def calibrations(
    configuration: ExportConfiguration, source_names: Collection[str], *, model: str, symmetric: bool
) -> dict[str, PlannedTask]:
    """Return the task that calibrates each level that needs it, now or in reserve, by level.

    Args:
        configuration: The configuration.
        source_names: Names of the sources.
        model: Reference to the merged model.
        symmetric: Whether the integers have no zero points.
    """
    levels = calibrated_levels(configuration) or reserve_levels(configuration)
    if not levels:
        return {}
    stage, optimization = stage_of(Role.CALIBRATION), configuration.optimization
    data = text(configuration, source_names, model=model).reference
    return {
        level: PlannedTask(
            id=f"{stage.name}-{level}{_suffix(symmetric, optimization.symmetric, bits)}",
            stage=stage.name,
            params={
                "bits": bits,
                "group_size": optimization.group_size,
                "method": AUTO if optimization.method == WITHOUT_DATA else optimization.method,
                "symmetric": symmetric or bits >= WIDEST,
                "time_budget_seconds": optimization.time_budget,
                **_widths(configuration, level),
            },
            inputs={"model": model, "data": data},
            output=stage.main_output,
            fallback=_FALLBACK,
        )
        for level, bits in levels.items()
    }


def _suffix(symmetric: bool, usual: bool, bits: int) -> str:
    return "-symmetric" if symmetric and not usual and bits < WIDEST else ""


def _widths(configuration: ExportConfiguration, level: str) -> dict[str, Any]:
    """Return the parameters that say which weights of a level get more bits."""
    optimization, bits = configuration.optimization, bits_of(level) or 0
    head = {"head": optimization.head_bits <= bits}
    if len(widths_of(level)) < 2:
        return head
    return head | ({"sensitivity": True} if optimization.size_budget else {"wide_share": optimization.wide_share})


def used_calibrations(
    planned: Collection[PlannedTask], data: PlannedTask, tasks: Iterable[PlannedTask]
) -> list[PlannedTask]:
    """Return the planned calibrations that any of the tasks uses, behind the task that chooses the text of some.

    A format of another distribution may make its levels in its own way.
    """
    references = {reference for task in tasks for reference in (*task.inputs.values(), *task.reserve.values())}
    used = [task for task in planned if task.reference in references]
    return [data, *used] if used or data.reference in references else []


def text(configuration: ExportConfiguration, source_names: Collection[str], *, model: str) -> PlannedTask:
    """Return the task that chooses the text, which calibrations and some levels read; arguments as :func:`calibrations`."""
    stage, validation = stage_of(Role.CALIBRATION_DATA), configuration.validation
    named = bool(configuration.optimization.calibration)
    sources = (SOURCE, *(["heldout"] if validation.enabled else []))
    return PlannedTask(
        id=stage.name,
        stage=stage.name,
        params={
            "source": "given" if named else "run",
            "overlap": "leave_out" if validation.enabled else "ignore",
        },
        inputs={"model": model} | {name: f"source:{name}" for name in sources if name in source_names},
        output=stage.main_output,
        fallback="" if depends_on_text(configuration) else _FALLBACK,
    )
