"""A result at a prompt and in a notebook, and as an error."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

import slipway
from slipway.results.report import write_report
from slipway.results.result import ExportResult, FailedFormat
from support.commands.report_page import Page
from support.commands.report_parts import LINEAGE, output, result, validation

HOSTILE = '<script>alert("1")</script>\n\u202e'


def delivered(folder: Path, name: str = "onnx") -> ExportResult:
    """Return a result with its report."""
    found = validation(output(name), output("onnx-int4", 0.019))
    made = result(found, (name, "onnx-int4")).model_copy(
        update={"output_directory": str(folder), "validation_report_path": str(folder / "report.html")}
    )
    write_report(folder, result=made, validation=found, lineage=LINEAGE)
    return made


def test_it_is_three_lines(tmp_path: Path) -> None:
    made = delivered(tmp_path)
    first, second, third = repr(made).splitlines()
    assert first.startswith(f"ExportResult {made.export_id}: succeeded, 2 of 2 formats made")
    assert second.startswith("onnx ")
    assert "passed, onnx-int4 " in second
    assert third == str(tmp_path)
    assert str(made) == repr(made)


def test_a_failure_is_three_lines_without_secrets_and_commands() -> None:
    many = {f"{HOSTILE}{number}": FailedFormat(task="t", state="not_run") for number in range(30)}
    failed = result(None, ()).model_copy(
        update={
            "success": False,
            "reason": "OUT_OF_MEMORY",
            "error_message": f"too large: s3://user:geheim@host/x {HOSTILE * 500}",
            "failed": many,
            "requested": tuple(many),
        }
    )
    lines = repr(failed).splitlines()
    assert len(lines) == 3
    assert "failed: OUT_OF_MEMORY, 0 of 30 formats made" in lines[0]
    assert "and 24 more" in lines[1] or "characters" in lines[1]
    assert all(len(line) <= 300 for line in lines)
    for text in (repr(failed), failed._repr_html_()):
        assert "geheim" not in text
        assert "\u202e" not in text
    assert "<script" not in failed._repr_html_()
    assert repr(result(None, (), output_directory="")).splitlines()[1:] == ["nothing was made", "nothing was delivered"]


def test_a_notebook_shows_the_first_page_of_the_report_in_a_frame(tmp_path: Path) -> None:
    made = delivered(tmp_path, name="onnx<b>")
    shown = Page(made._repr_html_())
    [(tag, attributes)] = shown.seen
    assert (tag, attributes["sandbox"]) == ("iframe", "")
    inner = attributes["srcdoc"]
    assert html.unescape(made._repr_html_()).count("<iframe") == 1
    page = Page(inner)
    assert "Every output passed validation." in page.text
    assert "onnx<b>" in page.text
    assert "Attempts" not in page.text
    assert inner.startswith("<!DOCTYPE html>")
    assert inner.endswith("</header></body></html>")
    whole = (tmp_path / "report.html").read_text()
    assert whole.startswith(inner.removesuffix("</body></html>"))


def test_without_its_report_a_notebook_shows_the_text(tmp_path: Path) -> None:
    made = delivered(tmp_path)
    text = f"<pre>{html.escape(repr(made))}</pre>"
    another = made.model_copy(update={"export_id": "e-another"})
    assert another._repr_html_() == f"<pre>{html.escape(repr(another))}</pre>"
    (tmp_path / "report.html").write_bytes(b"\xff\xfe\xff")
    assert made._repr_html_() == text
    (tmp_path / "report.html").unlink()
    assert made._repr_html_() == text
    data = made.model_copy(update={"validation_report_path": str(tmp_path / "report.json")})
    assert data._repr_html_() == text


def test_it_is_as_it_was_where_it_is_data() -> None:
    made = result(None, ())
    assert ExportResult.model_validate_json(made.model_dump_json()) == made
    assert made.require() is made


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("VALIDATION_FAILED", slipway.ValidationError),
        ("ADAPTER_BASE_MISMATCH", slipway.ModelMergeError),
        ("GGUF_INVALID", slipway.GGUFExportError),
        ("EXPORT_ENGINE_FAILED", slipway.FormatExportError),
        ("OUT_OF_MEMORY", slipway.ModelExportError),
        ("INTERNAL", slipway.ModelExportError),
    ],
)
def test_a_failed_export_can_be_made_an_error(reason: str, kind: type[slipway.ModelExportError]) -> None:
    failed = result(None, ()).model_copy(
        update={"success": False, "reason": reason, "error_message": "a fault; a remedy"}
    )
    with pytest.raises(slipway.ModelExportError) as caught:
        failed.require()
    assert type(caught.value) is kind
    assert caught.value.reason == reason
    assert str(caught.value) == "a fault; a remedy"


def test_a_reason_of_another_version_is_an_error_too() -> None:
    failed = result(None, ()).model_copy(update={"success": False, "reason": "OF_TOMORROW", "error_message": "x"})
    with pytest.raises(slipway.ModelExportError, match="OF_TOMORROW: x") as caught:
        failed.require()
    assert caught.value.reason == "INTERNAL"
