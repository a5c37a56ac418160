"""The report of an export made from what a store has of it, whether or not its outputs were delivered."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pydantic

from slipway.artifacts import Artifacts
from slipway.errors import ArtifactError
from slipway.planning.references import VALIDATION
from slipway.results.delivery import lineage
from slipway.results.outcome import export_result
from slipway.results.report.document import Report
from slipway.validation.findings import ValidationReport
from slipway_protos.v1 import export_pb2 as pb


def stored_validation(export: pb.Export, store: Artifacts) -> ValidationReport | None:
    """Read the validation report of an export; None if validation did not run.

    Args:
        export: The coordinator's record.
        store: Store of its artifacts.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` for one of another version; ``ARTIFACT_NOT_FOUND`` or ``ARTIFACT_CORRUPT``.
    """
    digest = export.outputs.get(VALIDATION, "")
    if not digest:
        return None
    with tempfile.TemporaryDirectory(prefix="slipway-validation-") as scratch:
        folder = store.fetch(digest, Path(scratch) / VALIDATION)
        try:
            return ValidationReport.read(folder)
        except (OSError, pydantic.ValidationError) as error:
            raise ArtifactError(
                f"the stored validation report {digest} was written by another version of Slipway",
                reason="ARTIFACT_INVALID",
                remedy="use a new SLIPWAY_HOME, or remove it from the store: slipway cache gc --older-than 0s",
            ) from error


def stored_report(export: pb.Export, store: Artifacts) -> Report:
    """Return the report of an ended export, as its delivery writes it.

    Args:
        export: The coordinator's record.
        store: Store of its artifacts.

    Raises:
        ArtifactError: As :func:`stored_validation`.
    """
    validation = stored_validation(export, store)
    result = export_result(export, store=store, validation=validation)
    return Report.of(result, validation=validation, lineage=lineage(export))
