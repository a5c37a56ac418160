"""For which outputs the reference's shape cases speak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.formats import Runtime
from slipway_validate.outputs import REFERENCE_CODE, SAME_CODE, explain_shape_reuse

CONFIG = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6}, "dtype": "bfloat16", "sliding_window": None}
PACKED = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}


def known(tmp_path: Path, config: Any, *, load: str = REFERENCE_CODE) -> str:
    folders = tmp_path / "output", tmp_path / "base"
    for folder, content in zip(folders, (config, CONFIG), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    return explain_shape_reuse(Runtime(name="x", load=load, files=("*",)), *folders)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16"},
        {"quantization_config": PACKED, "tie_word_embeddings": False},
        {"torch_dtype": "float32"},
    ],
)
def test_how_weights_are_stored_changes_no_shape(tmp_path: Path, change: dict[str, Any]) -> None:
    assert known(tmp_path, {**CONFIG, **change}) == SAME_CODE


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 8},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"a_setting_of_a_later_version": 1},
        {"quantization_config": {**PACKED, "kv_cache_scheme": {"num_bits": 8}}},
        {"quantization_config": "odd"},
        {
            "quantization_config": {
                **PACKED,
                "config_groups": {"g": {"weights": {}, "input_activations": {"dynamic": True}}},
            }
        },
        {"quantization_config": {**PACKED, "config_groups": ["odd"]}},
    ],
)
def test_any_other_setting_may(tmp_path: Path, change: dict[str, Any]) -> None:
    assert known(tmp_path, {**CONFIG, **change}) == ""


def test_other_code_may(tmp_path: Path) -> None:
    assert known(tmp_path, CONFIG, load="slipway_validate.runner.onnx_graphs.load:load") == ""


def test_an_output_without_a_configuration_may(tmp_path: Path) -> None:
    assert known(tmp_path, []) == ""
