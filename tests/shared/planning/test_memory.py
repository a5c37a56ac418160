"""What a plan's tasks take of the memory, and what a machine with too little of it is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.formats import PlannedTask
from slipway.planning.memory import memory_bytes
from slipway.planning.preflight import Finding, Verdict, model_size, preflight
from slipway.sizes import ModelSize


def planned(task: str, stage: str, *, delivers: str = "") -> PlannedTask:
    return PlannedTask(task, stage, {}, {}, delivers)


PLAN = (
    planned("merge", "merge", delivers="pytorch"),
    PlannedTask("int4", "quantize", {"level": "int4", "format": "pytorch"}, {}, "pytorch-int4"),
    planned("onnx_export", "onnx_export", delivers="onnx"),
    planned("validate", "validate"),
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"a": np.zeros((100, 10), np.float16), "b": np.zeros(24, np.float16)}, folder / "model.safetensors")
    return folder


def test_experts_of_a_layer_count_where_they_are_more_than_the_largest_tensors() -> None:
    size = ModelSize(weights=10**9, weight_bytes=2 * 10**9, largest=10**7, largest_bytes=2 * 10**7, companion_bytes=0)
    dense = memory_bytes(PLAN, size, least=True)
    assert memory_bytes(PLAN, size, least=True, layers_of_experts=100) == dense, (
        "60 MB are less than four tensors in float32"
    )
    joined = memory_bytes(PLAN, size, least=True, layers_of_experts=10)
    assert joined - dense == 600_000_000 - 160_000_000, "a tenth of the weights in float32 and in 16 bits"
    assert memory_bytes(PLAN[:-1], size, least=True, layers_of_experts=10) == dense, "no other stage joins them"


def test_too_little_memory_for_a_whole_model_says_what_is_left_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = model_size(base)
    whole, least = memory_bytes(PLAN, size), memory_bytes(PLAN, size, least=True)
    assert whole - least == size.weights * 4
    assert memory_bytes(PLAN[:-1], size) == least
    tensorrt = [*PLAN, planned("tensorrt_build", "tensorrt_build", delivers="tensorrt")]
    assert memory_bytes(tensorrt, size, least=True) == whole, "an engine is built of all weights"

    def said(available: int) -> Finding:
        monkeypatch.setattr("slipway.planning.preflight.available_memory", lambda _: available)
        checked = preflight(PLAN, base=base, home=tmp_path / "home", output=tmp_path / "out")
        return next(each for each in checked.findings if each.check == "memory")

    assert said(whole).verdict is Verdict.OK
    assert said(least).verdict is Verdict.WARNING
    assert "layer by layer, without generated text and speed" in said(least).message
    assert "layer by layer" not in said(least - 1).message
    assert "validation.enabled: false" in said(least - 1).remedy
