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
    reads_text,
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


class Calibrations:
    """The tasks that choose integers by text, and what each format gets of them.

    Attributes:
        text: The task that chooses the text, which calibrations and some levels read.
        reads_text: Whether the export reads text to make its levels.
        in_reserve: Whether calibrations run only for outputs that fail validation.
    """

    def __init__(self, configuration: ExportConfiguration, source_names: Collection[str], *, model: str) -> None:
        """Plan them for the formats of a configuration.

        Args:
            configuration: The configuration, with its method decided.
            source_names: Names of the sources.
            model: Reference to the merged model.
        """
        reserve = reserve_levels(configuration)
        self._configuration = configuration
        self._levels = calibrated_levels(configuration) or reserve
        self.text = _plan_text(configuration, source_names, model=model)
        self.reads_text = reads_text(configuration)
        self.in_reserve = bool(reserve)
        asked = [each for each, _ in configuration.formats.enabled() if each.quantization.calibrated]
        self._tasks = {
            symmetric: self._plan(model, symmetric=symmetric)
            for symmetric in dict.fromkeys(self._is_symmetric(each) for each in asked)
        }

    @property
    def ids(self) -> set[str]:
        """Return the ids of all calibrations."""
        return set(self._by_id())

    def references(self, each: Format[Any]) -> dict[str, str]:
        """Return the reference to the calibration of each level of a format that has one."""
        own = self._tasks.get(self._is_symmetric(each), {}) if each.quantization.calibrated else {}
        return {level: task.reference for level, task in own.items()}

    def used(self, tasks: Iterable[PlannedTask]) -> list[PlannedTask]:
        """Return the calibrations that any of the tasks uses, behind the task that chooses the text of some.

        A format of another distribution may make its levels in its own way.
        """
        references = {reference for task in tasks for reference in (*task.inputs.values(), *task.reserve.values())}
        used = [task for task in self._by_id().values() if task.reference in references]
        return [self.text, *used] if used or self.text.reference in references else []

    def _by_id(self) -> dict[str, PlannedTask]:
        return {task.id: task for by_level in self._tasks.values() for task in by_level.values()}

    def _is_symmetric(self, each: Format[Any]) -> bool:
        """Return whether the calibrated integers of a format have no zero points."""
        optimization = self._configuration.optimization
        mixed = bool(optimization.size_budget or optimization.wide_share)
        return optimization.symmetric or (mixed and not each.quantization.zero_points)

    def _plan(self, model: str, *, symmetric: bool) -> dict[str, PlannedTask]:
        """Return the task that calibrates each level that needs it, now or in reserve, by level."""
        stage, optimization = stage_of(Role.CALIBRATION), self._configuration.optimization
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
                    **_widths(self._configuration, level),
                },
                inputs={"model": model, "data": self.text.reference},
                output=stage.main_output,
                fallback=_FALLBACK,
            )
            for level, bits in self._levels.items()
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


def _plan_text(configuration: ExportConfiguration, source_names: Collection[str], *, model: str) -> PlannedTask:
    """Return the task that chooses the text."""
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
