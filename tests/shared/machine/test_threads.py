"""Waiting threads of numeric libraries sleep in every process, unless the user chose otherwise."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipway.execution.execution import Execution
from slipway.execution.supervisor import execute
from slipway.machine.cgroup import ControlGroup
from slipway.machine.processes import session_options, sleeping_threads, thread_variables
from slipway.stage_call import Limits, StageCall

BUSY = "while True: pass"
SHOW_OPENMP = {"OMP_DISPLAY_ENV": "VERBOSE"}
"""Makes an OpenMP runtime print what it read, when it is loaded."""
TRAIN = """
import os, sys, time
from dataclasses import replace
from slipway.sample.recipe import Recipe
from slipway.sample.training import deterministic
times = []
with deterministic(int(sys.argv[2])):
    from transformers import AutoTokenizer
    from slipway.sample.models import train_base
    train_base(AutoTokenizer.from_pretrained(sys.argv[1]), list(range(1000)) * 4, recipe=replace(Recipe(), base_steps=6), seed=0,
               on_step=lambda _: times.append(time.process_time()))
assert "OMP_WAIT_POLICY" not in os.environ
print((times[-1] - times[1]) / 4)
"""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the wait policy of threads."""
    kept = {name: value for name, value in os.environ.items() if name not in {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}}
    return {**kept, **more}


def test_a_process_gets_its_number_of_threads_and_they_sleep() -> None:
    variables = thread_variables(3, environment={})
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
    assert {variables[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert "OMP_WAIT_POLICY" not in thread_variables(3, environment={"OMP_WAIT_POLICY": "ACTIVE"})


def test_what_is_set_for_a_while_is_gone_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before = dict(os.environ)
    with sleeping_threads():
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert dict(os.environ) == before
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with sleeping_threads():
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_sessions_of_onnx_runtime_do_not_spin() -> None:
    options = session_options(2)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert (options.intra_op_num_threads, session_options(0).intra_op_num_threads) == (2, 1)


@pytest.mark.parametrize(("own", "policy"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_so_does_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, policy: str) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    execution = Execution(StageCall("support.stages.plain:ENVIRONMENT", {}, {}, Limits(threads=3)), tmp_path)
    outcome = asyncio.run(execute(execution))
    found = json.loads((outcome.outputs["out"] / "environment.json").read_text())
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"]) == (policy, "3")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def step(sample: Path, *, threads: int) -> float:
    """Return the processor time of a training step, in seconds."""
    command = [sys.executable, "-c", TRAIN, str(sample / "qwen3-base"), str(threads)]
    ran = subprocess.run(command, env=environment(**SHOW_OPENMP), capture_output=True, text=True, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in ran.stderr, "training loads its OpenMP with threads that sleep"
    return float(ran.stdout)


@pytest.mark.slow
def test_training_beside_busy_processes_does_not_collapse(sample: Path) -> None:
    with busy_processes(len(os.sched_getaffinity(0))):
        spent = step(sample, threads=2)
    # Threads that spin for one that gets no time take many times the processor time of the work itself.
    assert spent < 3 * step(sample, threads=1)


@contextmanager
def half_a_core() -> Iterator[str]:
    """Make a real control group with half a core; return the shell command that joins it."""
    version_1, version_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    root = version_1 if (version_1 / "cpu.cfs_quota_us").exists() or version_1.is_dir() else version_2
    group = root / f"slipway-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"making a control group needs privileges: {error}")
    try:
        quota = group / "cpu.cfs_quota_us"
        try:
            if quota.exists():
                (group / "cpu.cfs_period_us").write_text("100000")
                quota.write_text("50000")
            else:
                (group / "cpu.max").write_text("50000 100000")
        except OSError as error:
            pytest.skip(f"this machine has no quotas of processor time: {error}")
        yield f"echo $$ > {group / 'cgroup.procs'}"
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # the kernel takes a moment to forget its last process
                time.sleep(0.1)


def joined(join: str, program: str, *arguments: str) -> str:
    command = ["/bin/sh", "-c", f'{join} && exec "$0" "$@"', sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout


def test_a_real_quota_of_half_a_core_is_one_thread() -> None:
    program = "from slipway.machine.cgroup import *; print(ControlGroup().cores(), usable_cores())"
    if ControlGroup().cores() is not None:
        pytest.skip("this process has a quota already")
    with half_a_core() as join:
        assert joined(join, program).split() == ["0.5", "1"]
