"""Run packaged folders by optimum's classes, in the environment that has them: optimum-onnx pins another transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("OPTIMUM_PYTHON", "")
"""Interpreter of that environment; ``pip install optimum-onnx[onnxruntime]`` makes one."""
NEEDS_OPTIMUM = pytest.mark.skipif(
    not PYTHON, reason="OPTIMUM_PYTHON names no interpreter with optimum-onnx, which pins another transformers"
)

_RUN = """
import json, sys
import numpy as np, torch
import optimum.onnxruntime as ort
kind, folder, given, asked = json.load(sys.stdin)
model = getattr(ort, kind).from_pretrained(folder, use_io_binding=False, **asked.pop("load", {}))
rows = {name: torch.tensor(value) for name, value in given.items()}
with torch.no_grad():
    found = model.generate(**rows, **asked).tolist() if asked else {k: v.tolist() for k, v in model(**rows).items() if torch.is_tensor(v)}
print("RESULT" + json.dumps(found))
"""


def run_optimum(kind: str, folder: Path, given: dict[str, Any], **asked: Any) -> Any:
    """Run a class of optimum on a folder: generate tokens as asked for, or return the results by name."""
    asking = json.dumps([kind, str(folder), given, asked])
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "-c", _RUN], input=asking, capture_output=True, text=True, check=False, timeout=300, env=environment,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])
