"""Whether a base has to be prepared, told without reading a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipway.errors import CheckpointValidationError
from slipway.model.base_format import base_format, prepared_sizes
from slipway.model.folder import ModelFolder


def model(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


DENSE = {"a.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        (DENSE, {}, ""),
        (DENSE, {"quantization_config": {}}, ""),
        ({"a.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}, {}, "fp8"),
        (DENSE, {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (DENSE, {"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        (DENSE, {"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        (DENSE, {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
    ids=["plain", "empty", "bare-fp8", "gptq", "old-bitsandbytes", "old-compressed", "nested"],
)
def test_what_a_base_is_stored_as(tmp_path: Path, tensors: Any, config: Any, expected: str) -> None:
    assert base_format(ModelFolder.open(model(tmp_path / "base", tensors, **config))) == expected


def test_a_pickle_is_told_by_its_name(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", DENSE, quantization_config={"quant_method": "gptq"})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert base_format(ModelFolder.open(folder)) == "pickle gptq"


@pytest.mark.parametrize("method", ["hqq", None, 3], ids=["hqq", "unnamed", "number"])
def test_an_unknown_method_is_refused_before_anything_is_stored(tmp_path: Path, method: Any) -> None:
    folder = model(tmp_path / "base", DENSE, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointValidationError) as caught:
        base_format(ModelFolder.open(folder))
    assert caught.value.reason == "BASE_QUANTIZATION_UNSUPPORTED"


def test_sizes_are_those_of_the_dense_model(tmp_path: Path) -> None:
    packed = {"a.qweight": torch.zeros(8, 16, dtype=torch.int32), "b": torch.zeros(10, dtype=torch.float16)}
    folder = model(tmp_path / "base", packed, quantization_config={"quant_method": "gptq", "bits": 4})
    assert sorted(prepared_sizes(folder)) == [(10, 20), (8 * 16 * 8, 2 * 8 * 16 * 8)]
    pickled = model(tmp_path / "pickled", DENSE, vocab_size=5, hidden_size=10)
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(bytes(1000))
    assert prepared_sizes(pickled) == [(50, 100), (450, 900)]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings 2147483647"),
        ({"text_config": {"n_positions": 2**31 - 1}}, "n_positions 2147483647"),
        ({"is_encoder_decoder": True, "max_position_embeddings": 1 << 20}, "max_position_embeddings 1048576"),
        ({"is_encoder_decoder": True, "max_source_positions": 1 << 20}, "max_source_positions"),
        ({"rope_parameters": {"original_max_position_embeddings": 1 << 40}}, "original_max_position_embeddings"),
    ],
)
def test_positions_that_no_model_has_are_refused(tmp_path: Path, settings: Any, key: str) -> None:
    folder = model(tmp_path / "model", {"a": torch.zeros(2)}, **settings)
    with pytest.raises(CheckpointValidationError, match=key) as caught:
        base_format(ModelFolder.open(folder))
    assert caught.value.reason == "BASE_MODEL_INVALID"


def test_the_longest_known_contexts_are_taken(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", {"a": torch.zeros(2)}, max_position_embeddings=10_485_760, num_hidden_layers=2)
    assert base_format(ModelFolder.open(folder)) == ""
