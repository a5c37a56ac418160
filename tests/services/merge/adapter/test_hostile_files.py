"""Reading any configuration and tokenizer of an adapter ends with a value or a documented reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

import slipway_merge.plan.peft_forms  # noqa: F401 - its libraries are not what reading a file costs
from slipway.errors import ModelExportError
from slipway.model.adapters.adapter_config import parse_adapter_config
from slipway.model.configuration import ModelConfig
from slipway_merge.adapter.adapter import read_adapter
from slipway_merge.adapter.naming import fit_names
from slipway_merge.plan.embeddings import check_vocabulary, highest_token_id
from support.hostile.json_grammar import answer, documents

CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}, "use_rslora": False,
    "layer_replication": None, "modules_to_save": [], "trainable_token_indices": None, "exclude_modules": None, "bias": "none",
}  # fmt: skip
TOKENIZER = {"added_tokens": [{"id": 3, "content": "x"}], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    tensors = {f"{MODULE}.lora_A.weight": torch.ones(2, 4), f"{MODULE}.lora_B.weight": torch.ones(4, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@settings(max_examples=80)
@given(data=documents(CONFIG))
def test_adapters(adapter: Path, data: bytes) -> None:
    (adapter / "adapter_config.json").write_bytes(data)
    answer(lambda: read_adapter(adapter), seconds=2.0)


@settings(max_examples=60)
@given(data=documents(TOKENIZER))
def test_tokenizers(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(data)
    found = answer(lambda: highest_token_id(folder))
    assert not isinstance(found, ModelExportError)
    answer(lambda: check_vocabulary(folder / "none", folder, ModelConfig({"vocab_size": 2})))


def test_as_many_targets_as_modules_are_found_in_reasonable_time() -> None:
    modules = [f"model.layers.{number}.mlp.experts.{expert}.up_proj" for number in range(40) for expert in range(128)]
    config = parse_adapter_config({**CONFIG, "target_modules": modules}, modules)
    found = answer(lambda: sum(map(config.targets, modules)))
    assert found == len(modules)
    assert not config.targets("model.layers.0.mlp.experts.0.down_proj")


def test_more_patterns_than_can_be_matched_are_refused(adapter: Path) -> None:
    modules = [f"layers.{number}.q_proj" for number in range(5000)]
    config = {**CONFIG, "rank_pattern": {f"m{number}.*": 2 for number in range(20_000)}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = answer(lambda: parse_adapter_config(config, modules))
    assert isinstance(found, ModelExportError)
    assert (found.reason, "for 5000 modules" in found.message) == ("ADAPTER_CONFIG_INVALID", True)


def test_names_under_thousands_of_prefixes_are_refused_in_reasonable_time() -> None:
    parts = [f"p{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(200)]
    stored = [".".join(parts[start:]) for start in range(1, 198)]
    wanted = [".".join(parts), *(f"z.{number}.weight" for number in range(60_000))]
    found = answer(lambda: fit_names(wanted, stored))
    assert isinstance(found, ModelExportError)
    assert found.reason == "ADAPTER_BASE_MISMATCH"
