"""Text like that of an adapter's training is looked for beside the run, and what cannot be used there ends no export."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.configuration import ExportConfiguration, parse
from slipway.export_sources import text_files
from slipway.export_sources.text_files import find_own_text

CONFIGURATION = parse({"validation": {"enabled": True, "compare_outputs": True}})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoint-10"
    folder.mkdir(parents=True)
    return folder


def found(checkpoint: Path | None, *, calibration: Path | None = None, match: BaseMatch | None = None) -> Path | None:
    configuration: ExportConfiguration = CONFIGURATION
    return find_own_text(configuration, checkpoint, calibration, match)


@pytest.mark.parametrize(
    "name", ["train.jsonl", "data/train.parquet", "checkpoint-10/dataset.txt", "calibration.jsonl"]
)
def test_a_dataset_beside_the_run_is_found(checkpoint: Path, name: str) -> None:
    file = checkpoint.parent / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("text")
    assert found(checkpoint) == file
    proven = BaseMatch(status=BaseMatchStatus.CONFIRMED, reason="by digest")
    assert found(checkpoint, match=proven) is None, "nothing is left to prove"
    assert found(None) is None


def test_the_text_for_calibration_comes_first(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "train.jsonl").write_text("text")
    given = tmp_path / "given"
    given.mkdir()
    (given / "notes.md").write_text("no text that is read")
    (given / "b.txt").write_text("text")
    assert found(checkpoint, calibration=given) == given / "b.txt"


def test_what_cannot_be_used_is_passed_over(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.jsonl").write_text("text")
    (checkpoint / "train.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (checkpoint / "train.json").write_text("")
    (checkpoint / "train.txt").mkdir()
    assert found(checkpoint) is None
    (checkpoint / "dataset.txt").write_text("text")
    assert found(checkpoint) == checkpoint / "dataset.txt"
    monkeypatch.setattr(text_files, "LARGEST", 3)  # instead of a file of 64 MiB
    assert found(checkpoint) is None
