"""The text for calibration as a source: a file or folder that the user names, or the sample that a run brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.errors import ConfigurationError
from slipway.export_sources import text_files
from slipway.export_sources.discovery import find_sources
from slipway.exporting.preparing import Uploads, find_uploads
from slipway.settings import Settings
from slipway.sources import SourceFolders
from support.models import tiny_models

INT4 = {"quantization": "int4", "method": "auto"}
NEVER_CALIBRATED = {"quantization": "int4", "method": "rtn", "on_failure": "fail"}
"""Nothing is calibrated, at once or where an output fails."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and a run."""
    root = tmp_path_factory.mktemp("run")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[SourceFolders]:
    with SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})) as opened:
        yield opened


def configuration(run: Path, on_failure: str = "fallback", **optimization: Any) -> Any:
    paths = {"checkpoint": {"path": str(run / "run")}, "base_model": {"name": str(run / "base")}}
    return parse({**paths, "optimization": optimization, "validation": {"on_failure": on_failure}})


def write(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_or_a_folder_is_taken_without_what_is_no_text(run: Path, folders: SourceFolders, tmp_path: Path) -> None:
    for name in ("a.txt", "more/b.jsonl", "c.md", "d.safetensors", "e.parquet", "f.JSON"):
        write(tmp_path / "texts" / name)
    for path, expected in (
        (tmp_path / "texts", {"a.txt", "more/b.jsonl", "e.parquet", "f.JSON"}),
        (tmp_path / "texts" / "a.txt", {"a.txt"}),
    ):
        asked = configuration(run, **INT4, calibration=str(path))
        assert set(find_sources(asked, folders).files()["calibration"]) == expected
        assert set(find_uploads(asked, folders, {}).files["calibration"]) == expected


def test_what_nobody_calibrates_is_neither_looked_for_nor_stored(run: Path, folders: SourceFolders) -> None:
    found = find_sources(configuration(run, **NEVER_CALIBRATED, calibration="/nowhere"), folders)
    assert (found.calibration, set(found.files())) == (None, {"base", "adapter"})


@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_the_sample_of_its_training_data_that_a_run_brings_is_used(
    folders: SourceFolders, tmp_path: Path, where: str
) -> None:
    tiny_models.make_base(tmp_path / "base")
    checkpoint = tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run")
    assert find_sources(configuration(tmp_path, **INT4), folders).calibration is None
    sample = write((checkpoint if where == "checkpoint" else tmp_path / "run") / "calibration.jsonl")
    found = find_sources(configuration(tmp_path, **INT4), folders)
    assert found.calibration == sample
    assert set(found.files()["calibration"]) == {"calibration.jsonl"}
    assert "calibration.jsonl" not in found.files()["adapter"]
    brought = find_uploads(configuration(tmp_path, **INT4), folders, {"heldout": "s3://texts/a"})
    assert brought.files["calibration"] == {"calibration.jsonl": sample.resolve()}
    assert "calibration" not in find_uploads(configuration(tmp_path, **NEVER_CALIBRATED), folders, {}).files
    assert find_sources(configuration(tmp_path, **NEVER_CALIBRATED), folders).calibration is None


def test_a_sample_that_is_too_large_is_left_out_with_a_warning(
    folders: SourceFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MOST_BYTES", 99)
    tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run")
    write(tmp_path / "run" / "calibration.jsonl", "x" * 100)
    asked = configuration(tmp_path, **INT4)
    for found in (find_sources(asked, folders), find_uploads(asked, folders, {})):
        assert "calibration" not in (found.files if isinstance(found, Uploads) else found.files())
        assert any("99 B are allowed" in warning for warning in found.warnings)


def test_it_is_said_that_the_sample_of_an_imported_run_is_not_used(run: Path, folders: SourceFolders) -> None:
    imports = {"adapter": "s3://runs/a"}
    found = find_uploads(configuration(run, **INT4), folders, imports)
    assert "calibration" not in found.files
    assert any("calibration.jsonl" in warning for warning in found.warnings)
    for optimization in (NEVER_CALIBRATED, {**INT4, "calibration": str(write(run / "texts" / "a.txt"))}):
        assert find_uploads(configuration(run, **optimization), folders, imports).warnings == ()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.mkdir(), "has no file that ends in .txt"),
        (lambda path: write(path / "a.bin"), "has no file that ends in .txt"),
        (lambda path: [write(path / f"{number}.txt") for number in range(3)], "has more than 2 files"),
        (lambda path: write(path / "a.txt", "x" * 100), "and 99 B are allowed"),
    ],
    ids=["missing", "empty", "no text", "many", "large"],
)
def test_what_is_no_text_is_refused_by_name(
    run: Path, folders: SourceFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, fault: str
) -> None:
    monkeypatch.setattr(text_files, "MOST_BYTES", 99)
    monkeypatch.setattr(text_files, "_MOST_FILES", 2)
    make(tmp_path / "texts")
    asked = configuration(run, **INT4, calibration=str(tmp_path / "texts"))
    for find in (find_sources, lambda *some: find_uploads(*some, {})):
        with pytest.raises(ConfigurationError, match=fault) as caught:
            find(asked, folders)
        assert caught.value.about["key"] == "optimization.calibration"


def test_held_out_text_that_is_far_too_large_is_refused_unread(
    run: Path, folders: SourceFolders, tmp_path: Path
) -> None:
    """Its files take no room here: a file of 20 GB was read whole, to store it, for 4 million characters."""
    with write(tmp_path / "texts" / "a.txt").open("r+b") as file:
        file.truncate(20 << 30)
    paths = {"checkpoint": {"path": str(run / "run")}, "base_model": {"name": str(run / "base")}}
    asked = parse({**paths, "validation": {"heldout": str(tmp_path / "texts")}})
    for find in (find_sources, lambda *some: find_uploads(*some, {})):
        with pytest.raises(ConfigurationError, match=r"21\.5 GB, and 4\.3 GB are allowed") as caught:
            find(asked, folders)
        assert caught.value.about["key"] == "validation.heldout"
