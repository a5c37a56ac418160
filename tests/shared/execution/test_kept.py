"""The kept folder of an interrupted attempt: one attempt uses it at a time, and it is removed when it is useless."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.files.work_folders import UNUSED_SECONDS, kept_folder, remove_unused
from slipway.stage_call import StageCall

KEEPING = "support.stages.plain:KEEPING"


@pytest.fixture
def runner(tmp_path: Path) -> TaskRunner:
    return TaskRunner(LocalStore(tmp_path / "store"), tmp_path / "scratch")


def attempt(runner: TaskRunner, folder: Path, kind: str) -> TaskResult:
    """Tell the stage what to do after it has counted its attempts in the kept folder; this is not part of the action key."""
    told = folder / "kind"
    told.write_text(kind)
    return asyncio.run(runner.run(StageCall(KEEPING, {"told": str(told)}, {})))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("kill", "STAGE_KILLED"), ("abort", "STAGE_CRASHED"), ("torch-memory", "OUT_OF_MEMORY")],
)
def test_the_next_attempt_finds_what_an_interrupted_one_kept(
    runner: TaskRunner, tmp_path: Path, kind: str, reason: str
) -> None:
    failed = attempt(runner, tmp_path, kind)
    assert failed.failure is not None
    assert failed.failure.reason == reason
    [folder] = (tmp_path / "scratch").iterdir()
    assert folder.name.startswith(".keeping.slipway-kept-")
    again = attempt(TaskRunner(LocalStore(tmp_path / "store"), tmp_path / "scratch"), tmp_path, "succeed")
    assert again.facts == {"attempts": 2}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_final_failure_keeps_nothing(runner: TaskRunner, tmp_path: Path) -> None:
    failed = attempt(runner, tmp_path, "typed")
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.retryable) == ("ADAPTER_TENSOR_UNUSED", False)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_stage_that_keeps_a_memory_has_one_folder_for_all_actions(runner: TaskRunner, tmp_path: Path) -> None:
    runs = []
    for text in ("one", "other"):
        call = StageCall("support.stages.plain:REMEMBERING", {"text": text}, {})
        result = asyncio.run(runner.run(call))
        assert result.failure is None
        runs.append(result.facts["runs"])
    assert runs == [1, 2]
    [folder] = (tmp_path / "scratch").iterdir()
    assert folder.name == ".remembering.slipway-kept-memory"
    assert asyncio.run(runner.run(call)).reused


def test_two_attempts_never_share_it(tmp_path: Path) -> None:
    with kept_folder(tmp_path, "merge", "k") as first, kept_folder(tmp_path, "merge", "k") as second:
        assert first is not None
        assert second is None
        with kept_folder(tmp_path, "merge", "other") as other:
            assert other not in (None, first)
        (first / "file").write_text("x")
    with kept_folder(tmp_path, "merge", "k") as third:
        assert third == first
        assert (third / "file").read_text() == "x"


def test_an_empty_one_is_not_left(tmp_path: Path) -> None:
    with kept_folder(tmp_path, "merge", "k") as folder:
        assert folder is not None
    assert list(tmp_path.iterdir()) == []


def test_unused_ones_go_and_others_stay(tmp_path: Path) -> None:
    for name, days in (("old", 4), ("new", 1), ("used", 9)):
        folder = tmp_path / f".merge.slipway-kept-{name}"
        folder.mkdir()
        (folder / "shard").write_bytes(bytes(1000))
        os.utime(folder, (0, time.time() - days * 86_400))
    (tmp_path / ".merge.slipway-kept-empty").mkdir()
    (tmp_path / ".merge.slipway-kept-old" / "shared").hardlink_to(tmp_path / ".merge.slipway-kept-new" / "shard")
    os.utime(tmp_path / ".merge.slipway-kept-old", (0, time.time() - 4 * 86_400))
    with kept_folder(tmp_path, "merge", "used") as used:
        assert used is not None
        assert not (tmp_path / ".merge.slipway-kept-old").exists()
        assert not (tmp_path / ".merge.slipway-kept-empty").exists()
        assert remove_unused(tmp_path, seconds=UNUSED_SECONDS) == {}
        assert remove_unused(tmp_path, seconds=0, dry_run=True) == {".merge.slipway-kept-new": 1000}
        assert (tmp_path / ".merge.slipway-kept-new").exists()
        assert remove_unused(tmp_path, seconds=0) == {".merge.slipway-kept-new": 1000}
    assert [path.name for path in tmp_path.iterdir()] == [".merge.slipway-kept-used"]
