"""A build on a GPU whose memory another program has taken ends with a reason of its own, and succeeds when there is room again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.commands.cli import start

from .conftest import Model, export

FILL = """
import sys, torch
held = []
size = 1 << 30
while size >= 1 << 20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size >>= 1
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def full_gpu() -> Iterator[subprocess.Popen[str]]:
    """Take all of the GPU's memory, in a process of its own, until it is ended."""
    process = subprocess.Popen([sys.executable, "-P", "-c", FILL], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_build_waits_for_the_gpu_s_memory(
    model: Model, tmp_path: Path, needs_seconds: Callable[[float], None]
) -> None:
    pytest.importorskip("tensorrt", reason="not run: tensorrt is not installed")
    if model.name != "small":
        pytest.skip("the small model shows it")
    needs_seconds(120)
    words = [*export(replace(model, out=tmp_path / "out")), "--set", "formats.tensorrt.batch=[1,1,1]"]
    words += ["--set", "validation.enabled=false"]
    with full_gpu() as other:
        command = start(words, model.home)
        assert command.stderr is not None
        for line in command.stderr:
            if "GPU_OUT_OF_MEMORY" in line:
                break
        other.kill()
        command.communicate(timeout=300)
    assert command.returncode == 0
    attempts = replace(model, out=tmp_path / "out").report["result"]["attempts"]
    built = [attempt for attempt in attempts if attempt["stage"] == "tensorrt_build"]
    failed = [attempt["reason"] for attempt in built if attempt["outcome"] == "failed"]
    assert failed
    assert set(failed) == {"GPU_OUT_OF_MEMORY"}
    assert built[-1]["outcome"] == "done"
