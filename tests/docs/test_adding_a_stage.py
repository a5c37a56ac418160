"""The stage that the documentation adds is run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.execution.execution import Execution
from slipway.execution.supervisor import Outcome, execute
from slipway.stage_call import StageCall

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-stage.md"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "documented_stage.py").write_text(code.group(1))
    path = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": np.zeros(3), "b": np.ones(2)}, model / "model.safetensors")

    def run_with(**params: object) -> Outcome:
        workdir = tmp_path / "work"
        workdir.mkdir()
        return asyncio.run(
            execute(Execution(StageCall("documented_stage:STAGE", params, {"model": str(model)}), workdir))
        )

    return run_with


def test_the_documented_stage_runs(run) -> None:
    outcome = run(minimum=2)
    assert outcome.failure is None
    assert outcome.facts == {"tensors": 2}
    assert (outcome.outputs["count"] / "count.txt").read_text() == "2\n"


def test_the_documented_stage_fails_as_documented(run) -> None:
    outcome = run(minimum=3)
    assert outcome.failure is not None
    assert outcome.failure.reason == "BASE_MODEL_INVALID"


def test_nothing_heavy_is_imported_with_slipway() -> None:
    heavy = ("torch", "transformers", "onnx", "tensorrt", "numpy", "grpc", "dbos")
    code = f"import sys, slipway, slipway.stage, slipway.registry, slipway.errors; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
