"""The report as data: ``report.json``. ``report.schema.json`` beside this module describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from slipway.results.result import ExportResult
from slipway.validation.findings import OutputValidation, Reference, ValidationReport


class Report(BaseModel):
    """The data of the page and the model card.

    Attributes:
        schema_version: Raised when a field changes its meaning.
        result: The result of the export.
        validation: The validation report; None if nothing was validated.
        lineage: The origin of the outputs: sources, labels, tasks with their parameters, versions of the tools.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    result: ExportResult
    validation: ValidationReport | None = None
    lineage: dict[str, Any] = {}

    @classmethod
    def of(
        cls, result: ExportResult, *, validation: ValidationReport | None, lineage: Mapping[str, Any] | None
    ) -> Report:
        """Make a report of these parts."""
        return cls(result=result, validation=validation, lineage=dict(lineage or {}))

    @property
    def name(self) -> str:
        """Return the model's name, from the lineage or else from the output directory."""
        return self.label("model_name") or self.result.output_directory.rstrip("/").rpartition("/")[2] or "model"

    def label(self, key: str) -> str:
        """Return one of the export's labels, such as ``base_model``; empty if the export does not have it."""
        return str(self.lineage.get("labels", {}).get(key, ""))

    @property
    def reference(self) -> str:
        """What outputs were compared with, for people."""
        return "the model itself" if self.result.plain else "base + adapter, unmerged,"

    @property
    def baseline(self) -> Reference | None:
        """Return the reference if its speed was measured: PyTorch runs it eagerly, and outputs are timed in turn with it."""
        reference = self.validation.reference if self.validation else None
        return reference if reference is not None and reference.speed is not None else None

    @property
    def outputs(self) -> tuple[OutputValidation, ...]:
        """Return the validation of each output, in the formats' order."""
        order = {name: number for number, name in enumerate(self.result.formats)}
        outputs = self.validation.outputs if self.validation else ()
        return tuple(sorted(outputs, key=lambda output: (order.get(output.name, len(order)), output.name)))

    @property
    def timed(self) -> tuple[OutputValidation, ...]:
        """Return the outputs whose speed was measured."""
        return tuple(output for output in self.outputs if output.speed is not None)

    def validated(self, name: str) -> OutputValidation | None:
        """Return the validation of one format; None if it was not validated."""
        return next((output for output in self.outputs if output.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all formats, made or not, in the plan's order."""
        order = {name: number for number, name in enumerate(self.result.requested)}
        names = (*self.result.formats, *self.result.failed)
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))
