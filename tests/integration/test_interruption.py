"""Ending the command in the middle: by kill -9 during each stage, and by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands.cli import slipway, start
from support.harness.unhurried import unhurried
from support.models import tiny_models

pytestmark = pytest.mark.timeout(900)

# In the order in which they start, so that every killed run has something finished behind it.
TASKS = ("merge", "onnx_export", "validate")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def command(project: Path) -> list[str | Path]:
    settings = [
        "formats.pytorch.quantization=int8",
        "validation.test_samples=2",
        "validation.benchmark_performance=false",
    ]
    where = ["--base-model", project / "base", "--checkpoint", project / "run", "--out", project / "out"]
    return [
        "export",
        "--json",
        "--progress",
        "json",
        *where,
        *(word for setting in settings for word in ("--set", setting)),
    ]


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The command's JSON lines; whatever else it writes is passed over."""
    assert process.stderr is not None
    for line in process.stderr:
        document = json.loads(line)  # anything else would be noise between JSON lines
        if "event" in document:
            yield document


def run_until(process: subprocess.Popen[str], task: str) -> list[dict[str, Any]]:
    """Follow a command until a task runs."""
    seen = []
    for event in events(process):
        seen.append(event)
        if event.get("task") == task and event["event"] == "progress":
            return seen
    raise AssertionError(f"{task} never ran: {seen[-5:]}")


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


def kill(process: subprocess.Popen[str]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert gone(children, 60), "a killed command left processes behind"


def ran(seen: list[dict[str, Any]]) -> set[str]:
    """Tasks that were carried out to their end in this run: not known as finished at its start, and not reused."""
    states = [(event["task"], event) for event in seen if event["event"] == "task"]
    running = {task for task, event in states if event["state"] == "running"}
    return {task for task, event in states if event["state"] == "succeeded" and not event.get("reused")} & running


@pytest.mark.slow
def test_killed_in_one_stage_after_the_other_nothing_finished_is_done_again(project: Path, tmp_path: Path) -> None:
    """One kill after the other, in the order of the stages: each run has what those before it finished."""
    arguments = [*command(project), "--out", tmp_path / "out"]
    finished: set[str] = set()
    for task in TASKS:
        process = start(arguments, tmp_path / "home")
        try:
            seen = run_until(process, task)
        finally:
            kill(process)
        assert ran(seen) & finished == set(), f"carried out again after the kill in {task}"
        finished |= ran(seen)
        assert task not in finished
    done = slipway(*arguments, home=tmp_path / "home")
    assert done.code in (0, 4), done.err[-3000:]
    last = ran([event for event in map(json.loads, done.err.splitlines()) if "event" in event])
    assert last & finished == set()
    assert "validate" in last
    assert set(done.json["paths"]) == {"pytorch", "pytorch-int8", "onnx"}
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert list((tmp_path / "home" / "scratch").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "task"), [(signal.SIGINT, "onnx_export"), (signal.SIGTERM, "merge")])
def test_an_interrupt_ends_all_within_five_seconds(
    project: Path, tmp_path: Path, number: signal.Signals, task: str
) -> None:
    """And by Ctrl-C nothing that is finished is lost: the same command goes on."""
    arguments = [*command(project), "--out", tmp_path / "out"]
    process = start(arguments, tmp_path / "home")
    seen = run_until(process, task)
    children = psutil.Process(process.pid).children(recursive=True)
    begin = time.monotonic()
    os.kill(process.pid, number)
    process.communicate(timeout=120)
    assert gone(children, 120)
    assert time.monotonic() - begin < unhurried(5)
    assert process.returncode == 130
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    assert list((tmp_path / "home" / "scratch").iterdir()) == []
    if number is signal.SIGINT:
        assert "merge" in ran(seen)
        done = slipway(*arguments, home=tmp_path / "home")
        assert done.code in (0, 4), done.err
        attempts = {attempt["task"]: attempt for attempt in done.json["attempts"] if attempt["outcome"] == "succeeded"}
        assert set(attempts) >= {"merge", "onnx_export", "validate"}
        assert "merge" not in ran([event for event in map(json.loads, done.err.splitlines()) if "event" in event])


@pytest.mark.slow
def test_two_commands_at_once_share_one_store(project: Path, tmp_path: Path) -> None:
    common = [*command(project), "--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false"]
    first = start([*common, "--out", tmp_path / "a"], tmp_path / "home")
    second = start([*common, "--out", tmp_path / "b", "--set", "formats.pytorch.quantization=none"], tmp_path / "home")
    outs = [json.loads(process.communicate(timeout=500)[0]) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert outs[0]["formats"]["pytorch"]["digest"] == outs[1]["formats"]["pytorch"]["digest"]


@pytest.mark.slow
def test_the_same_command_twice_at_once_does_the_work_once_or_says_why_not(project: Path, tmp_path: Path) -> None:
    common = [*command(project), "--set", "validation.enabled=false", "--out", tmp_path / "a"]
    first = start(common, tmp_path / "home")
    run_until(first, "merge")
    second = slipway(*common, home=tmp_path / "home")
    first.communicate(timeout=500)
    assert first.returncode in (0, 4)
    assert second.code in (0, 4, 7)
    if second.code == 7:
        assert second.json["reason"] == "COORDINATOR_LOCKED"
