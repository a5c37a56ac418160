"""The results of a batch: which failure decides, how they show themselves, and the table in the output directory."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slipway.errors import ArtifactError, CheckpointValidationError, ModelExportError, ValidationError
from slipway.exporting.batches.result import TABLE, BatchEntry, BatchResult, check_table, rows, write_table
from slipway.exporting.batches.subjects import LeftOut
from slipway.results.result import ExportResult, FailedFormat, FormatResult


def export(*, reason: str = "", **formats: FormatResult) -> ExportResult:
    return ExportResult(
        export_id="e-1",
        timestamp=datetime(2030, 1, 1, tzinfo=UTC),
        success=not reason,
        formats={name.replace("_", "-"): each for name, each in formats.items()},
        failed={"onnx": FailedFormat(task="onnx_export", state="skipped")} if reason else {},
        output_directory="/out/e-1",
        reason=reason,
        error_message=f"it is {reason}" if reason else "",
    )


GOOD = export(
    pytorch=FormatResult(digest="sha256:1", size_bytes=2048, status="passed", mean_kl=0.013),
    pytorch_int8=FormatResult(digest="sha256:2", size_bytes=1024, status="not_run", relative_error=0.5),
)
MISSING = CheckpointValidationError("there is none", reason="CHECKPOINT_NOT_FOUND", remedy="name another")
LOST = ModelExportError("away", reason="COORDINATOR_UNAVAILABLE")
BATCH = BatchResult(
    (
        BatchEntry("a", "/runs/a", GOOD, seconds=1.25),
        BatchEntry("b", "/runs/b", None, MISSING),
        BatchEntry("c", "/runs/c", export(reason="VALIDATION_FAILED"), seconds=3.0),
        BatchEntry("d", "/runs/d", None, LOST, seconds=0.5),
    ),
    (LeftOut("notes", "it is a file"),),
)


def test_it_is_a_sequence_of_entries() -> None:
    assert [entry.name for entry in BATCH] == ["a", "b", "c", "d"]
    assert (len(BATCH), BATCH[1].error, BATCH[-1].name) == (4, MISSING, "d")
    assert [entry.name for entry in BATCH[1:3]] == ["b", "c"]
    assert BATCH.failed == BATCH[1:]
    assert [entry.state for entry in BATCH] == ["succeeded", "impossible", "failed", "failed"]
    assert not BATCH.success
    assert BATCH[0].require() is GOOD
    with pytest.raises(CheckpointValidationError) as caught:
        BATCH[1].require()
    assert caught.value is MISSING
    with pytest.raises(ValidationError, match="it is VALIDATION_FAILED"):
        BATCH[2].require()


@pytest.mark.parametrize(
    ("entries", "code", "name"),
    [((0,), 0, ""), ((0, 3), 7, "d"), ((0, 1, 3), 3, "b"), ((3, 1, 2, 0), 4, "c")],
)
def test_the_failure_that_decides_is_that_of_one_export_with_all_of_them(
    entries: tuple[int, ...], code: int, name: str
) -> None:
    batch = BatchResult(tuple(BATCH.entries[number] for number in entries))
    assert batch.exit_code == code
    if not code:
        assert batch.require() is batch
        return
    with pytest.raises(ModelExportError) as caught:
        batch.require()
    assert caught.value.message.startswith(f"{name} ({len(batch.failed)} of {len(batch)} exports failed): ")


def test_it_shows_itself_in_three_lines_and_as_a_table() -> None:
    first, second, third = repr(BATCH).splitlines()
    assert first == "BatchResult: 1 of 4 exports succeeded, 1 left out"
    assert second == "failed: b CHECKPOINT_NOT_FOUND, c VALIDATION_FAILED, d COORDINATOR_UNAVAILABLE"
    assert third == "nothing was delivered"
    shown = list(rows(BATCH))
    assert shown[0] == ("a", "succeeded", "pytorch", "passed", "2.0 kB", "1.3e-02", "1.2 s")
    assert shown[1] == ("a", "succeeded", "pytorch-int8", "not run", "1.0 kB", "5.0e-01 relative error", "1.2 s")
    assert shown[2] == ("b", "impossible [CHECKPOINT_NOT_FOUND]", "–", "–", "–", "–", "–")
    assert shown[3] == ("c", "failed [VALIDATION_FAILED]", "onnx", "skipped", "–", "–", "3.0 s")
    hostile = BatchResult((BatchEntry("<b>\x1b[2J", "/x", None, MISSING),))
    page = hostile._repr_html_()
    assert "<b>" not in page
    assert "\x1b" not in page + repr(hostile)


def test_the_table_is_written_whole_and_replaces_only_one_like_it(tmp_path: Path) -> None:
    check_table(tmp_path)
    write_table(BATCH, tmp_path)
    check_table(tmp_path)
    write_table(BatchResult(BATCH.entries[:1]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [TABLE]
    document = json.loads((tmp_path / TABLE).read_text())
    assert (document["success"], document["exit_code"]) == (True, 0)
    [entry] = document["exports"]
    assert (entry["name"], entry["state"], entry["seconds"]) == ("a", "succeeded", 1.25)
    assert ExportResult.model_validate(entry["result"]) == GOOD
    assert stat.S_ISREG((tmp_path / TABLE).lstat().st_mode)


@pytest.mark.parametrize("other", ["{}", "[1]", "no JSON", '{"schema": "another/1"}', "link", "folder"])
def test_another_file_of_that_name_is_kept(tmp_path: Path, other: str) -> None:
    path = tmp_path / TABLE
    if other == "link":
        write_table(BATCH, tmp_path)
        path.rename(tmp_path / "real")
        path.symlink_to("real")
    elif other == "folder":
        path.mkdir()
    else:
        path.write_text(other)
    with pytest.raises(ArtifactError) as caught:
        check_table(tmp_path)
    assert caught.value.reason == "OUTPUT_EXISTS"
