"""What is found in a folder to export, what is left out with which reason, and folders that are refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.exporting.batches import subjects
from slipway.exporting.batches.subjects import Subject, find_subjects, subjects_of
from support.models.sweeps import make_adapter, make_model, make_sweep


def test_runs_adapters_and_models_are_found_by_name(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "b-run")
    make_adapter(sweep / "c-adapter", tmp_path / "base")
    make_model(sweep / "a-model")
    (sweep / "d-broken" / "checkpoint-3").mkdir(parents=True)  # a run, which fails as it does alone
    found, left_out = find_subjects(sweep)
    assert found == [
        Subject("a-model", str(sweep / "a-model"), plain=True),
        Subject("b-run", str(sweep / "b-run")),
        Subject("c-adapter", str(sweep / "c-adapter")),
        Subject("d-broken", str(sweep / "d-broken")),
    ]
    assert left_out == []
    assert found[0].flags({"--out": "x"}) == {"--out": "x", "--checkpoint": "none", "--base-model": found[0].path}
    assert found[1].flags({}) == {"RUN": found[1].path}


def test_what_is_none_is_named_with_its_reason(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "run")
    (sweep / "empty").mkdir()
    (sweep / ".git").mkdir()
    (sweep / "notes.txt").write_text("notes")
    (sweep / "alias").symlink_to("run")
    (sweep / "gone").symlink_to("nowhere")
    (sweep / "outside").symlink_to(tmp_path / "base")
    (sweep / "loop").symlink_to("loop")
    make_adapter(sweep / "named" / "english", tmp_path / "base")
    (sweep / "exported").mkdir()
    (sweep / "exported" / "lineage.json").write_text("{}")
    os.mkfifo(sweep / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(sweep / "socket"))
        found, left_out = find_subjects(sweep)
    assert [each.name for each in found] == ["run"]
    why = {each.name: each.why for each in left_out}
    assert list(why) == sorted(why)
    assert why["empty"] == "it holds no checkpoint, adapter or model"
    assert why[".git"] == "its name begins with a dot"
    assert why["notes.txt"] == "it is a file"
    assert why["alias"] == "it is a link to 'run', which stands for itself"
    assert why["gone"] == "it is a link to nothing"
    assert "outside of" in why["outside"]
    assert "english" in why["named"]
    assert why["exported"] == "it is the output of an export"
    for special in ("pipe", "socket"):
        assert "special file" in why[special]
    assert "loop" in why


def test_a_link_to_a_run_deeper_in_the_folder_is_that_run(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "archive/old")
    (sweep / "latest").symlink_to("archive/old")
    found, left_out = find_subjects(sweep)
    assert [each.name for each in found] == ["latest"]
    assert [each.name for each in left_out] == ["archive"]


def refusal(folder: Path | str) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        find_subjects(folder)
    return caught.value


def test_a_run_or_a_model_is_exported_alone(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "run")
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "base")
    for folder, remedy in (
        (sweep / "run", f"slipway export {sweep / 'run'}"),
        (adapter, f"slipway export {adapter}"),
        (tmp_path / "base", f"slipway export --base-model {tmp_path / 'base'}"),
    ):
        error = refusal(folder)
        assert error.reason == "BATCH_INVALID"
        assert remedy in error.remedy


def test_folders_without_anything_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (refusal(tmp_path / "empty").reason, "it is empty" in str(refusal(tmp_path / "empty"))) == (
        "CHECKPOINT_NOT_FOUND",
        True,
    )
    (tmp_path / "files").mkdir()
    for number in range(8):
        (tmp_path / "files" / f"{number}.txt").touch()
    assert "'0.txt': it is a file" in str(refusal(tmp_path / "files"))
    assert "and 3 more" in str(refusal(tmp_path / "files"))
    for missing in (tmp_path / "nowhere", tmp_path / "files" / "0.txt", "nul\0", "s3://bucket/sweep"):
        error = refusal(missing)
        assert error.reason in ("CHECKPOINT_NOT_FOUND", "CONFIGURATION_INVALID"), missing
        assert error.remedy


def test_more_entries_than_the_bound_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path, "a", "b", "c")
    monkeypatch.setattr(subjects, "MOST_SUBJECTS", 3)
    assert len(find_subjects(sweep)[0]) == 3
    (sweep / "d").mkdir()
    assert refusal(sweep).reason == "BATCH_INVALID"
    with pytest.raises(ModelExportError, match="a list of 4 runs"):
        subjects_of([sweep / "a"] * 4)


def test_a_list_has_its_own_order_and_may_name_other_places(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "b", "a")
    runs = [sweep / "b", str(sweep / "a" / "checkpoint-10"), "s3://bucket/far/run/", tmp_path / "base", "missing"]
    found = subjects_of(runs)
    assert [each.name for each in found] == ["b", "a/checkpoint-10", "run", "base", "missing"]
    assert [each.plain for each in found] == [False, False, False, True, False]
    with pytest.raises(ModelExportError) as caught:
        subjects_of([])
    assert caught.value.reason == "BATCH_INVALID"
