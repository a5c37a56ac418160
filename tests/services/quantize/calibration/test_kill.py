"""A calibration that is killed goes on at the block, and at the step of the tuning, where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.stage import Context
from support.models.calibrated_models import SMALL, Material, shortened

RUN = """
import json, sys
from pathlib import Path
from slipway.stage import Context
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.stage import STAGE
model, data, workdir, kept = map(Path, sys.argv[1:5])
workdir.mkdir()
ctx = Context(workdir=workdir, kept=kept)
STAGE.run({"model": model, "data": data}, CalibrateParams(**json.loads(sys.argv[5])), ctx)
"""


@pytest.mark.slow
def test_a_killed_calibration_goes_on(
    sample: Path, material: Material, tmp_path: Path, calibrate: Callable[..., tuple[Path, Context]]
) -> None:
    """Killed after the second block, and again in the tuning: what was kept is not done again, and the bytes are the same."""
    model = shortened(sample, tmp_path / "two-layers", layers=2)
    params = {**SMALL, "method": "autoround", "window_tokens": 32, "threads": 2, "head": False}
    kept = tmp_path / "kept"
    kept.mkdir()

    def kill_at(piece: str, workdir: Path) -> None:
        words = [str(path) for path in (model, material.data, workdir, kept)]
        killed = subprocess.Popen([sys.executable, "-c", RUN, *words, json.dumps(params)])
        deadline = time.monotonic() + 300
        while not (kept / piece).exists():
            assert killed.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.kill()
        killed.wait()

    kill_at("block-1.json", tmp_path / "first")
    blocks = [kept / f"block-{index}.json" for index in range(2)]
    written = [path.stat().st_mtime_ns for path in blocks]
    assert not (kept / "tuning.json").exists()
    kill_at("tuning.json", tmp_path / "second")
    assert [path.stat().st_mtime_ns for path in blocks] == written

    again, ctx = calibrate(model, material.data, kept=kept, **params)
    assert ctx.facts["blocks_resumed"] == ctx.facts["blocks"] == 3
    assert ctx.facts["steps_resumed"] > 0
    undisturbed, _ = calibrate(model, material.data, **params)
    assert (again / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()


@pytest.mark.slow
def test_damaged_pieces_are_made_again(
    material: Material, tmp_path: Path, calibrate: Callable[..., tuple[Path, Context]]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    def run() -> tuple[int, bytes]:
        folder, ctx = calibrate(material.model, material.data, kept=kept, method="gptq")
        return ctx.facts["blocks_resumed"], (folder / "weights.safetensors").read_bytes()

    _, first = run()
    path = kept / "block-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run() == (0, first)
    path.with_suffix(".json").write_text("{")
    assert run() == (0, first)
