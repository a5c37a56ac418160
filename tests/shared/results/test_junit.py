"""``report.junit.xml`` as CI systems read it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase

from slipway.results.report import write_report
from slipway.results.result import ExportResult, FailedFormat
from slipway.validation.findings import OutputStatus, ValidationReport
from support.commands.report_parts import not_run, output, result, validation


def read(folder: Path, made: ExportResult, found: ValidationReport | None) -> dict[str, dict[str, TestCase]]:
    """Write a report and return its suites and cases by name, as a reader of CI systems finds them."""
    write_report(folder, result=made, validation=found)
    suites = list(JUnitXml.fromfile(str(folder / "report.junit.xml")))
    for suite in suites:
        counted = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()
        assert counted == (suite.tests, suite.failures, suite.errors, suite.skipped)
    cases = {suite.name: {case.name: case for case in suite} for suite in suites}
    assert [len(found) for found in cases.values()] == [suite.tests for suite in suites]  # no name twice
    return cases


def test_a_suite_is_an_output_and_a_case_a_measure(tmp_path: Path) -> None:
    found = validation(output("pytorch"), output("onnx-int4", 0.4), not_run("tensorrt"))
    suites = read(tmp_path, result(found, ("pytorch", "onnx-int4", "tensorrt")), found)
    assert list(suites) == ["pytorch", "onnx-int4", "tensorrt"]
    assert {name: case.result for name, case in suites["pytorch"].items()} == {"made": [], "ran": [], "mean_kl": []}
    (failure,) = suites["onnx-int4"]["mean_kl"].result
    assert isinstance(failure, Failure)
    assert failure.message == "mean_kl (against reference) is 0.4, limit <= 0.02"
    assert failure.text is not None
    assert "use a smaller group_size" in failure.text
    (skipped,) = suites["tensorrt"]["ran"].result
    assert isinstance(skipped, Skipped)
    assert skipped.message == "this machine has no NVIDIA GPU"


def test_what_was_not_made_or_could_not_run_is_an_error(tmp_path: Path) -> None:
    broken = output("onnx").model_copy(
        update={"status": OutputStatus.FAILED, "status_reason": "STAGE_CRASHED", "checks": (), "explanation": "it died"}
    )
    found = validation(broken)
    missing = {
        "onnx-int4": FailedFormat(task="q", state="failed", reason="OUT_OF_MEMORY", error_message="too large"),
        "onnx-int8": FailedFormat(task="q", state="cancelled"),
    }
    made = result(found, ("onnx",), failed=missing, requested=("onnx-int8", "onnx", "onnx-int4"), success=False)
    suites = read(tmp_path, made, found)
    assert list(suites) == ["onnx-int8", "onnx", "onnx-int4"]
    (crash,), (absent,) = suites["onnx"]["ran"].result, suites["onnx-int4"]["made"].result
    assert (type(crash), crash.message, crash.type) == (Error, "it died", "STAGE_CRASHED")
    assert (type(absent), absent.message, absent.type) == (Error, "too large", "OUT_OF_MEMORY")
    assert isinstance(suites["onnx-int8"]["made"].result[0], Skipped)


@pytest.mark.parametrize(("success", "kind"), [(True, Skipped), (False, Error)])
def test_without_validation_only_a_failed_export_is_red(tmp_path: Path, success: bool, kind: type) -> None:
    suites = read(tmp_path, result(None, ("onnx",), success=success, error_message="the reference died"), None)
    assert isinstance(suites["onnx"]["validated"].result[0], kind)


def test_an_export_without_any_output_is_red_too(tmp_path: Path) -> None:
    suites = read(tmp_path, result(None, (), success=False, reason="CANCELLED", error_message="cancelled"), None)
    assert suites["export"]["validated"].result[0].type == "CANCELLED"


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    nasty = "]]><x a='1'>&\x00\x0b\x1b[31m\ufffe\uffff\U0001f600 \u202e"
    found = validation(output("onnx", 0.4).model_copy(update={"explanation": nasty, "name": nasty}))
    suites = read(tmp_path, result(found, (nasty,)), found)
    ((name, cases),) = suites.items()
    assert "]]><x a='1'>&" in name
    assert "\U0001f600" in name
    assert cases["mean_kl"].result[0].text.startswith("]]><x a='1'>&")
    assert {element.tag for element in ET.parse(tmp_path / "report.junit.xml").iter()} == {
        *("testsuites", "testsuite", "properties", "property", "testcase", "failure", "system-out", "system-err")
    }
