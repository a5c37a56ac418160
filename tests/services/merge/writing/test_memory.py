"""A merge needs the memory of its blocks, not of the model; measured by the kernel in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MEASURE = """
import json, resource, sys
from pathlib import Path
import numpy, slipway_merge.merge
from slipway.stage import Context
from slipway_merge.stage import STAGE, MergeParams

folder, dtype = Path(sys.argv[1]), sys.argv[2]
numpy.ones((64, 64)) @ numpy.ones((64, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ctx = Context(workdir=folder / "work", threads=2)
STAGE.run({"base": folder / "base", "adapter": folder / "adapter"}, MergeParams(dtype=dtype), ctx)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown": (peak - before) * 1024, "base": ctx.facts["base_bytes"], "merged": ctx.facts["tensors_merged"]}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A base of 256 MiB: tensors that are merged, copied, and one with a single very long row per block."""
    folder = tmp_path_factory.mktemp("large")
    for name in ("base", "adapter"):
        (folder / name).mkdir()
    size = 4096
    weight = torch.randn(size, size).mul_(0.02)
    save_file(
        {f"layers.{n}.{m}.weight": weight.clone() for n in range(2) for m in ("a", "b")},
        folder / "base/model.safetensors",
    )
    (folder / "base/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 7}))
    pair = {"lora_A": torch.randn(4, size), "lora_B": torch.randn(size, 4)}
    tensors = {f"base_model.model.layers.{n}.a.{side}.weight": t.clone() for n in range(2) for side, t in pair.items()}
    save_file(tensors, folder / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["a"]}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_peak_memory_is_that_of_blocks(large, dtype):
    subprocess.run(["rm", "-rf", str(large / "work")], check=True)
    (large / "work").mkdir()
    command = [sys.executable, "-c", MEASURE, str(large), dtype]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert measured["merged"] == 2
    assert measured["base"] == 256 << 20
    assert measured["grown"] < 48 << 20, "less than one tensor of 64 MiB, and a fifth of the model"
