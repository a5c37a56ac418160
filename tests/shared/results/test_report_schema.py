"""``report.schema.json`` is a JSON Schema, is made of the models, and describes what they write and nothing else."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from slipway.results.report import write_report
from support.commands.report_parts import LINEAGE, not_run, output, result, validation
from support.harness.described_reports import SCHEMA, check_report, new_reports

ROOT = Path(__file__).parents[3]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    found = validation(output("onnx"), output("onnx-int4", None), not_run("tensorrt"))
    write_report(tmp_path, result=result(found, ("onnx", "onnx-int4", "tensorrt")), validation=found, lineage=LINEAGE)
    return tmp_path / "report.json"


def test_it_is_a_schema_and_says_what_every_field_means() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    silent = [
        f"{name}.{field}"
        for name, described in {"Report": schema, **schema["$defs"]}.items()
        for field, about in described.get("properties", {}).items()
        if not about.get("description") and "$ref" not in about
    ]
    assert silent == []


def test_it_is_that_of_the_models() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_report_schema.py"))
    assert SCHEMA.read_text(encoding="utf-8") == generator["document"](), "run python docs/generate_report_schema.py"


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("lineage"),
        lambda document: document["result"].update(success="yes"),
        lambda document: document["result"].pop("attempts"),
        lambda document: document["validation"]["outputs"][0].update(status="fine"),
        lambda document: document["validation"]["outputs"][0]["to_reference"].update(mean_kl="0.1"),
        lambda document: document.update(schema_version=2),
    ],
    ids=["no-lineage", "no-truth", "no-attempts", "no-status", "no-number", "another-version"],
)
def test_it_refuses_what_no_report_is(written: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(written.read_text())
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert list(validator.iter_errors(document)) == []
    assert list(validator.iter_errors({**document, "of_a_newer_version": 1})) == []
    change(document)
    assert len(list(validator.iter_errors(document))) >= 1


def test_the_tests_find_a_report_that_it_does_not_describe(written: Path) -> None:
    document = json.loads(written.read_text())
    check_report(written)
    written.write_text(json.dumps({**document, "of_no_model": 1}))
    with pytest.raises(AssertionError, match="of_no_model"):
        check_report(written)
    written.unlink()


def test_reports_in_the_folders_of_all_fixtures_are_looked_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("module")
    (folder / "out").mkdir()
    report = folder / "out" / "report.json"
    report.write_text("{}")
    assert new_reports([folder, "text", folder / "missing"]) == [report]
    assert new_reports([folder]) == []
    os.utime(report, ns=(1, 1))
    assert new_reports([folder]) == [report]
