"""Modules of a sentence encoder with pickled weights are converted, and taken from the base where the checkpoint lacks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipway.errors import CheckpointValidationError
from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from slipway.model.sentences import module_files
from slipway.stage import Context
from slipway_merge.writing.folder import copy_small_files
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE
from support.models.tiny_models import make_base

PLACES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))


def base_in(folder: Path) -> Path:
    make_base(folder / "base")
    return folder / "base"


def with_modules(folder: Path, *, dense: bool = True) -> Path:
    listed = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for at, (place, kind) in enumerate(PLACES)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    if dense:
        (folder / "2_Dense").mkdir(exist_ok=True)
        (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 8, "out_features": 2}))
        torch.save({"linear.weight": torch.ones(2, 8)}, folder / "2_Dense" / "pytorch_model.bin")
    return folder


def test_pickled_weights_of_a_module_are_converted(tmp_path: Path) -> None:
    base = with_modules(base_in(tmp_path))
    assert base_format(ModelFolder.open(base)) == "pickle"
    (tmp_path / "work").mkdir()
    made = STAGE.run({"base": base}, PrepareParams(), Context(workdir=tmp_path / "work"))["base"]
    assert sorted(path.name for path in (made / "2_Dense").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(made / "2_Dense" / "model.safetensors")["linear.weight"], torch.ones(2, 8))
    assert base_format(ModelFolder.open(made)) == ""


def test_a_module_that_only_the_base_has_is_taken_from_there(tmp_path: Path) -> None:
    base = with_modules(base_in(tmp_path))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with_modules(checkpoint, dense=False)
    chosen, missing = module_files(checkpoint, base)
    assert missing == []
    assert chosen["2_Dense/config.json"] == base / "2_Dense" / "config.json"
    assert chosen["1_Pooling/config.json"] == checkpoint / "1_Pooling" / "config.json"


@pytest.mark.parametrize(("in_checkpoint", "reason"), [(False, "BASE_MODEL_INVALID"), (True, "UNSAFE_PICKLE")])
def test_a_list_of_modules_never_names_what_is_not_there(tmp_path: Path, in_checkpoint: bool, reason: str) -> None:
    base, checkpoint, output = base_in(tmp_path), tmp_path / "checkpoint", tmp_path / "out"
    for folder in (checkpoint, output):
        folder.mkdir()
    with_modules(checkpoint, dense=in_checkpoint)
    config = json.loads((base / "config.json").read_text())
    for folder in (base, output):
        (folder / "config.json").write_text(
            json.dumps({**config, "architectures": ["BertModel"], "model_type": "bert"})
        )
    with pytest.raises(CheckpointValidationError) as caught:
        copy_small_files(ModelFolder.open(base), checkpoint, ModelFolder.open(output), tokenizer=False)
    assert caught.value.reason == reason
    assert "2_Dense" in caught.value.message
