"""Write the report's files into an output directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.distribution.extras import missing
from slipway.distribution.naming import install_command
from slipway.results.report.document import Report
from slipway.results.report.junit import junit
from slipway.results.result import ExportResult
from slipway.texts import escaped_json
from slipway.validation.findings import ValidationReport

JSON, JUNIT, HTML, CARD = "report.json", "report.junit.xml", "report.html", "README.md"


def main_file() -> tuple[str, tuple[str, ...]]:
    """Return the name of the file to read first, and a warning if only ``report.json`` can be written."""
    lacking = missing("report")
    if not lacking:
        return HTML, ()
    files = f"{HTML} and {CARD} were not written: they need {', '.join(lacking)}"
    return JSON, (f"{files}; {install_command('report')}, and deliver into another folder",)


def write_report(
    folder: Path,
    *,
    result: ExportResult,
    validation: ValidationReport | None = None,
    lineage: Mapping[str, Any] | None = None,
) -> None:
    """Write ``report.json`` and ``report.junit.xml``, and also ``report.html`` and ``README.md`` if the extra ``report`` is installed.

    The same parts always give the same bytes.

    Args:
        folder: The output directory, with a folder per format. The formats' chat templates are looked up in it; only these files
            are written.
        result: The result of the export.
        validation: The validation report; None if nothing was validated.
        lineage: The contents of ``lineage.json``.

    Raises:
        OSError: A file cannot be written.
    """
    report = Report.of(result, validation=validation, lineage=lineage)
    (folder / JSON).write_text(escaped_json(report.model_dump_json(indent=2)) + "\n", encoding="utf-8")
    (folder / JUNIT).write_text(junit(report), encoding="utf-8")
    if missing("report"):
        return
    from slipway.results.report.card import model_card
    from slipway.results.report.page import page

    (folder / HTML).write_text(page(report), encoding="utf-8")
    (folder / CARD).write_text(model_card(report, folder), encoding="utf-8")
