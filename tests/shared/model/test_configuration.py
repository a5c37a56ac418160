"""A model's configuration and folder as values: what follows from the settings, and that they do not change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway.model.model_files import is_cached

QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 96}


def test_a_configuration_does_not_change() -> None:
    settings: dict[str, Any] = dict(QWEN)
    config = ModelConfig(settings)
    settings["vocab_size"] = 7
    changed = config.with_changes({"vocab_size": 8})
    assert (config["vocab_size"], changed["vocab_size"], config.family) == (96, 8, DECODER)
    assert config == QWEN == copy.deepcopy(config)
    with pytest.raises(TypeError):
        config["vocab_size"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("settings", "vocabulary"),
    [
        ({"vocab_size": 9}, 9),
        ({"text_config": {"vocab_size": 9}}, 9),
        ({"vocab_size": 8, "text_config": {"vocab_size": 9}}, 8),
        ({"vocab_size": "9", "text_config": 7}, None),
    ],
    ids=range(4),
)
def test_tokens_of_the_text_part(settings: dict[str, Any], vocabulary: int | None) -> None:
    assert ModelConfig(settings).vocabulary == vocabulary


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": "gptq"}, None),
    ],
    ids=range(5),
)
def test_a_quantization_is_found_where_libraries_write_it(settings: dict[str, Any], method: str | None) -> None:
    assert ModelConfig(settings).quantization.get("quant_method") == method


@pytest.mark.parametrize(("token", "padding"), [(3, 3), (0, 0), (-1, 0), (96, 0), ("3", 0), (None, 0)], ids=range(6))
def test_padding_is_a_token_of_the_model(token: object, padding: int) -> None:
    assert ModelConfig({**QWEN, "pad_token_id": token}).padding == padding


def test_a_kind_that_is_named_is_not_another() -> None:
    assert ModelConfig(QWEN).of_type("qwen3") == QWEN
    assert ModelConfig({}).of_type("bert")["architectures"] == ["BertModel"]
    with pytest.raises(CheckpointValidationError, match="'qwen3'") as caught:
        ModelConfig(QWEN).of_type("bert")
    assert caught.value.reason == "BASE_MODEL_INVALID"


def test_a_folder_is_opened_with_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    model = ModelFolder.open(tmp_path)
    assert model.family is DECODER
    assert {name: info.shape for name, info in model.tensors.items()} == {"a": (2, 3)}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointValidationError, match="not a JSON object"):
        ModelFolder.open(tmp_path)


def test_the_cache_of_the_hub_is_looked_at_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--a--b").mkdir()
    assert is_cached("a/b")
    assert not is_cached("a/c")
    assert not is_cached("a\0b")
