"""What people name in place of a checkpoint or a base model: each has its own words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.errors import CheckpointValidationError
from slipway.model.model_files import resolve_base_model
from slipway.model.runs.checkpoints import find_checkpoint

A, B = ("base_model.model.model.layers.0.self_attn.q_proj." + end for end in ("lora_A.weight", "lora_B.weight"))
WEIGHTS = {A: np.ones((4, 8), np.float32), B: np.ones((8, 4), np.float32)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(WEIGHTS, folder / "adapter_model.safetensors")
    return folder


def refused(path: Path) -> CheckpointValidationError:
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(path)
    return caught.value


@pytest.mark.parametrize(
    ("names", "what", "remedy"),
    [
        (("lora_unet_down_blocks_0.lora_down.weight", "lora_te_text.alpha"), "image model, as kohya's", "fuse_lora"),
        (("unet.down.to_q.lora_A.weight", "text_encoder.q.lora_A.weight"), "image model, as diffusers", "fuse_lora"),
        ((A, B), "no adapter_config.json beside it", "put the adapter_config.json"),
        (("model.embed_tokens.weight",), "a file of weights", "--base-model"),
    ],
)
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, names: tuple[str, ...], what: str, remedy: str) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({name: np.ones((4, 8), np.float32) for name in names}, file)
    error = refused(file)
    assert error.reason == "CHECKPOINT_NOT_FOUND"
    assert what in error.message
    assert remedy in error.remedy


def test_a_file_of_a_checkpoint_leads_to_its_folder(run: Path) -> None:
    assert refused(run / "adapter_model.safetensors").remedy == f"name its folder: {run}"
    assert "is a file" in refused(run / "adapter_config.json").message
    (run / "cut.safetensors").write_bytes(b"x")
    assert "cannot be read as safetensors" in refused(run / "cut.safetensors").message


def test_an_adapter_in_several_files_says_how_it_becomes_one(run: Path) -> None:
    (run / "adapter_model.safetensors").unlink()
    for number, name in enumerate((A, B), 1):
        save_file({name: WEIGHTS[name]}, run / f"adapter_model-0000{number}-of-00002.safetensors")
    error = refused(run)
    assert "its adapter is in 2 files (adapter_model-00001-of-00002.safetensors" in error.message
    assert "save_file" in error.remedy


def test_empty_tensors_are_those_of_zero_3(run: Path) -> None:
    save_file({**WEIGHTS, A: np.zeros((0,), np.float32)}, run / "adapter_model.safetensors")
    error = refused(run)
    assert error.reason == "CHECKPOINT_INCOMPLETE"
    assert f"1 of 2 tensors in adapter_model.safetensors are empty, first {A!r}" in error.message
    assert "stage3_gather_16bit_weights_on_model_save" in error.remedy


def test_an_adapter_is_no_base_model(run: Path) -> None:
    with pytest.raises(CheckpointValidationError, match="is an adapter, not a base model") as caught:
        resolve_base_model(str(run))
    assert "--base-model" in caught.value.remedy


def test_a_base_that_only_needs_a_download_says_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointValidationError) as caught:
        resolve_base_model("some-owner/some-model")
    assert "hf download some-owner/some-model" in caught.value.remedy
    assert "--base-model hf://some-owner/some-model" in caught.value.remedy
