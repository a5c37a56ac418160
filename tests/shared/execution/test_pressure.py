"""Warnings before a stage reaches a limit, and the measured peak afterwards; with real processes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from slipway.execution.execution import Execution
from slipway.execution.pressure import Pressure, TreeMemory
from slipway.execution.supervisor import Outcome, execute
from slipway.machine.cgroup import ControlGroup
from slipway.observability import metrics
from slipway.stage import Progress
from slipway.stage_call import Limits, StageCall
from support.servers.metrics_page import page

MIB = 1 << 20
STAGE = "support.stages.plain:TROUBLE"


def run(
    workdir: Path, kind: str, *, seen: Path, until: str = "", max_memory_bytes: int = 4 << 30
) -> tuple[Outcome, list[str]]:
    """How a stage ended, and its warnings in order.

    Args:
        workdir: To be made.
        kind: What it does.
        seen: A file whose being there lets it go on: after the warning with these words, or without any, when all its memory
            was looked at.
        until: The words.
        max_memory_bytes: As in :class:`Execution`.
    """
    workdir.mkdir()
    execution = Execution(
        StageCall(STAGE, {"kind": kind, "until": str(seen)}, {}, Limits(max_memory_bytes=max_memory_bytes)), workdir
    )
    warnings: list[str] = []

    def hear(level: str, message: str) -> None:
        if level == "warning":
            warnings.append(message)
            if until and until in message:
                seen.touch()

    def look(_: Progress, memory_bytes: int) -> None:
        if not until and memory_bytes > 200 * MIB:
            seen.touch()

    return asyncio.run(execute(execution, on_progress=look, on_log=hear)), warnings


def test_memory_close_to_the_limit_is_said_once_with_its_figures(tmp_path: Path) -> None:
    limit = 200 * MIB
    with metrics.serving("127.0.0.1:0") as port:
        seen, words = tmp_path / "seen", "should stay below"
        outcome, warnings = run(tmp_path / "w", "much-memory", seen=seen, until=words, max_memory_bytes=limit)
        counted = page(port)["slipway_stage_pressure_total", (("kind", "memory"), ("stage", STAGE))]
    assert outcome.failure is None
    (warning,) = [one for one in warnings if "should stay below" in one]
    found = re.search(r"uses ([0-9.]+) MB of memory, ([0-9]+) % of the 209.7 MB", warning)
    assert found is not None, warning
    assert 188 <= float(found[1]) < 273
    assert 90 <= int(found[2]) < 130
    assert counted == 1
    assert outcome.peak_memory_bytes >= limit


def test_memory_far_from_the_limit_is_nothing_to_say(tmp_path: Path) -> None:
    _, warnings = run(tmp_path / "w", "child-memory", seen=tmp_path / "seen")
    assert [one for one in warnings if "should stay below" in one] == []


def test_the_peak_is_that_of_all_processes(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path / "w", "child-memory", seen=tmp_path / "seen")
    assert 200 * MIB < outcome.peak_memory_bytes < 400 * MIB


def test_a_peak_between_two_looks_is_known(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path / "w", "short-memory", seen=tmp_path / "seen")
    assert outcome.peak_memory_bytes > 150 * MIB


def test_a_disk_that_fills_is_said_before_it_is_full(small_disk: Path, tmp_path: Path) -> None:
    outcome, warnings = run(small_disk / "w", "slow-disk", seen=tmp_path / "seen", until="runs out of disk space")
    assert outcome.failure is not None
    assert outcome.failure.reason == "DISK_FULL"
    (warning,) = [one for one in warnings if "runs out of disk space" in one]
    found = re.search(r": ([0-9.]+) kB of 8.4 MB are left", warning)
    assert found is not None, warning
    assert 0 < float(found[1]) <= 420


def test_a_container_that_is_nearly_full_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{1000 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file {50 * MIB}\nactive_file {50 * MIB}\n")
    current = tmp_path / "memory.current"
    said: list[str] = []
    group = ControlGroup(tmp_path, tmp_path / "membership")
    pressure = Pressure("merge", tmp_path, max_memory_bytes=4 << 30, warn=said.append, group=group)
    memory = TreeMemory(resident=500 * MIB, anonymous=300 * MIB, peak=500 * MIB)
    for used in (980, 1000, 1000):  # 880 of them are no copies of files
        current.write_text(f"{used * MIB}\n")
        pressure.check(memory)
        if used == 980:
            assert [one for one in said if "container" in one] == []
    (warning,) = [one for one in said if "container" in one]
    assert "943.7 MB of the 1.0 GB" in warning
    assert "314.6 MB by the stage itself" in warning
