"""A calibration that is killed goes on at the block, and at the step of the tuning, where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
print(json.dumps(ctx.facts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("until", ["block-1.json", "tuning.json"])
def test_a_killed_calibration_goes_on(sample: Path, material: Material, tmp_path: Path, until: str) -> None:
    model = shortened(sample, tmp_path / "two-layers", layers=2)
    kept = tmp_path / "kept"
    kept.mkdir()

    def start(name: str, folder: Path) -> subprocess.Popen[str]:
        words = [str(path) for path in (model, material.data, tmp_path / name, folder)]
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                RUN,
                *words,
                json.dumps({**SMALL, "method": "autoround", "time_budget_seconds": 2, "threads": 2}),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    killed = start("killed", kept)
    deadline = time.monotonic() + 300
    while not (kept / until).exists():
        assert killed.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate()

    said, _ = start("again", kept).communicate()
    facts = json.loads(said)
    assert facts["blocks_resumed"] >= 2
    assert facts["blocks"] == 3
    assert (facts["steps_resumed"] > 0) == (until == "tuning.json")

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    start("undisturbed", fresh).communicate()
    weights = "calibration/weights.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "undisturbed" / weights).read_bytes()


@pytest.mark.slow
def test_damaged_pieces_are_made_again(material: Material, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    def run(name: str) -> dict[str, object]:
        words = [str(path) for path in (material.model, material.data, tmp_path / name, kept)]
        params = json.dumps({**SMALL, "method": "gptq"})
        done = subprocess.run(
            [sys.executable, "-c", RUN, *words, params], stdout=subprocess.PIPE, text=True, check=True
        )
        facts: dict[str, object] = json.loads(done.stdout)
        return facts

    run("first")
    path = kept / "block-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run("again")["blocks_resumed"] == 0
    weights = "calibration/weights.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "first" / weights).read_bytes()
    path.with_suffix(".json").write_text("{")
    assert run("once more")["blocks_resumed"] == 0
