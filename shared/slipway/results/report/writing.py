"""Write the report's files into an output directory; ``report.junit.xml`` has a suite per output, a case per measure with a limit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from slipway.distribution import install_command, missing_modules
from slipway.results.report.document import Report
from slipway.results.result import ExportResult, FailedFormat
from slipway.texts import escaped_json, one_line
from slipway.validation.findings import OutputStatus, OutputValidation, ValidationReport

JSON, JUNIT, HTML, CARD = "report.json", "report.junit.xml", "report.html", "README.md"

_NOT_IN_XML = re.compile("[\ufffe\uffff\U0001fffe\U0001ffff]")
"""Characters that XML 1.0 forbids, or parsers refuse, beside those that :func:`slipway.texts.printable` replaces."""
_HOST = "localhost"
"""The same report has the same bytes wherever it is written."""


def main_file() -> tuple[str, tuple[str, ...]]:
    """Return the name of the file to read first, and a warning if only ``report.json`` can be written."""
    lacking = missing_modules("report")
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
    if missing_modules("report"):
        return
    from slipway.results.report.card import model_card
    from slipway.results.report.page import page

    (folder / HTML).write_text(page(report), encoding="utf-8")
    (folder / CARD).write_text(model_card(report, folder), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a suite.

    Attributes:
        name: Name, unique in the suite.
        verdict: ``passed``, ``failure`` (a limit was not kept), ``error`` (it could not be made or run) or ``skipped``.
        message: What happened, on one line; empty if it passed.
        kind: Reason of a failure or error, or the check's name.
        text: More about it.
    """

    name: str
    verdict: str = "passed"
    message: str = ""
    kind: str = ""
    text: str = ""


def junit(report: Report) -> str:
    """Return the report as a JUnit document."""
    root = ET.Element("testsuites")
    for number, name in enumerate(report.names or ("export",)):
        _add_suite(root, number, name, list(_cases(report, name)), report)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _cases(report: Report, name: str) -> Iterator[Case]:
    failed, output = report.result.failed.get(name), report.validated(name)
    if failed is not None:
        yield _not_made_case(failed)
        return
    if name in report.result.formats:
        yield Case("made")
    if output is None:
        yield _not_validated_case(report.result)
        return
    yield _run_case(output)
    for check in output.checks:
        title = check.name if check.against == "reference" else f"{check.name} (against {check.against})"
        why = output.explanation + (f"\nWhat to do: {output.remedy}" if output.remedy else "")
        yield Case(title) if check.passed else Case(title, "failure", str(check), check.name, why)


def _not_made_case(failed: FailedFormat) -> Case:
    if failed.state in ("cancelled", "not_run"):
        return Case("made", "skipped", failed.error_message or failed.state)
    return Case("made", "error", failed.error_message, failed.reason or failed.state)


def _not_validated_case(result: ExportResult) -> Case:
    if result.success:
        return Case("validated", "skipped", "it was not validated")
    return Case("validated", "error", result.error_message or "the export failed", result.reason or "failed")


def _run_case(output: OutputValidation) -> Case:
    if output.status is OutputStatus.NOT_RUN:
        return Case("ran", "skipped", output.status_reason)
    if output.status is OutputStatus.FAILED and not output.failed_checks:
        return Case("ran", "error", output.explanation or output.status_reason, output.status_reason, output.remedy)
    return Case("ran")


def _add_suite(root: ET.Element, number: int, name: str, cases: list[Case], report: Report) -> None:
    counts = {verdict: sum(case.verdict == verdict for case in cases) for verdict in ("failure", "error", "skipped")}
    title = _text(name) or "output"
    suite = ET.SubElement(
        root,
        "testsuite",
        name=title,
        package="slipway",
        id=str(number),
        timestamp=f"{report.result.timestamp.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
        hostname=_HOST,
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time="0",
    )
    properties = ET.SubElement(suite, "properties")
    digest = report.result.formats[name].digest if name in report.result.formats else ""
    for key, value in (("export", report.result.export_id), ("digest", digest)):
        ET.SubElement(properties, "property", name=key, value=_text(value))
    for case in cases:
        _add_case(suite, title, case)
    ET.SubElement(suite, "system-out")
    ET.SubElement(suite, "system-err")


def _add_case(suite: ET.Element, title: str, case: Case) -> None:
    element = ET.SubElement(suite, "testcase", name=_text(case.name), classname=f"slipway.{title}", time="0")
    if case.verdict == "passed":
        return
    about = {"message": _text(case.message)} | ({"type": _text(case.kind)} if case.verdict != "skipped" else {})
    ET.SubElement(element, case.verdict, about).text = "\n".join(map(_text, case.text.splitlines())) or None


def _text(value: str) -> str:
    """Return a text on one line, without characters that XML cannot hold."""
    return _NOT_IN_XML.sub("\ufffd", one_line(value))
