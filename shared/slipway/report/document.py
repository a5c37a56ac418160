"""The report as data: ``report.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.result import AttemptResult, ExportResult
from slipway.validation import OutputValidation, ValidationReport


@dataclass(frozen=True, slots=True)
class Missing:
    """An output that was asked for and could not be made.

    Attributes:
        name: As it would have been delivered, such as ``onnx-int4``.
        reason: Stable reason of the last failure.
        message: What went wrong, with the remedy.
    """

    name: str
    reason: str
    message: str


class Report(BaseModel):
    """Everything the page and the model card are rendered from.

    Attributes:
        schema_version: Raised when a field changes its meaning.
        result: The answer of the export.
        validation: What validation found; None when nothing was validated.
        lineage: Where the outputs come from: sources, labels, tasks with their parameters, versions of the tools.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: int = 1
    result: ExportResult
    validation: ValidationReport | None = None
    lineage: dict[str, Any] = {}

    @classmethod
    def of(
        cls, result: ExportResult, *, validation: ValidationReport | None, lineage: Mapping[str, Any] | None
    ) -> Report:
        """A report of these parts."""
        return cls(result=result, validation=validation, lineage=dict(lineage or {}))

    @property
    def name(self) -> str:
        """Name of the model: the lineage's, or the output directory's."""
        return self.label("model_name") or self.result.output_directory.rstrip("/").rpartition("/")[2] or "model"

    def label(self, key: str) -> str:
        """One of the export's labels, such as ``base_model``; empty when it has none of this name."""
        return str(self.lineage.get("labels", {}).get(key, ""))

    @property
    def outputs(self) -> tuple[OutputValidation, ...]:
        """What validation found about each output, in the formats' order."""
        order = {name: number for number, name in enumerate(self.result.formats)}
        found = self.validation.outputs if self.validation else ()
        return tuple(sorted(found, key=lambda output: (order.get(output.name, len(order)), output.name)))

    def validated(self, name: str) -> OutputValidation | None:
        """What validation found about one format."""
        return next((output for output in self.outputs if output.name == name), None)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Outputs whose last attempt failed, in the order of the plan."""
        last = {attempt.task: attempt for attempt in self.result.attempts}
        failed = [attempt for attempt in last.values() if attempt.outcome == "failed"]
        named = [(_output_of(attempt), attempt) for attempt in failed]
        return tuple(
            Missing(name, attempt.reason, attempt.error_message)
            for name, attempt in named
            if name and name not in self.result.formats
        )


def _output_of(attempt: AttemptResult) -> str:
    """Name of the output that a task makes; empty for a task whose results are not delivered under one name."""
    match attempt.stage:
        case "quantize":
            return f"{attempt.params.get('format', '')}-{attempt.params.get('level', '')}".strip("-")
        case "tensorrt_build":
            return "tensorrt"
        case "onnx_export":
            return "tensorrt" if attempt.task.endswith("-tensorrt") else "onnx"
    return ""
