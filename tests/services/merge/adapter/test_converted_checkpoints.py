"""Adapters put together from what training left in pieces: their tensors have the names they have in the model."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from support.models.merge_forms import FORMS, save_form


@pytest.mark.parametrize(
    "name", ["lora", "modules_to_save", "bias=all", "lora on an embedding", "dora", "loha", "ia3", "lora on Conv2d", "oft",
             "trainable_token_indices", "target_parameters"]
)  # fmt: skip
def test_names_of_the_model_are_those_of_a_saved_adapter(tmp_path, name):
    case, cls = save_form(tmp_path, FORMS[name], torch.float32)
    expected = load_file(case.merge(verify="spot")[0] / "model.safetensors")
    model = peft.PeftModel.from_pretrained(cls.from_pretrained(case.base), case.adapter, is_trainable=True)
    trained = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    assert any(".default" in key for key in trained) or name == "bias=all"
    save_file(trained, case.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    case.workdir = tmp_path / "again"
    case.workdir.mkdir()
    merged = load_file(case.merge(verify="spot")[0] / "model.safetensors")
    assert all(torch.equal(merged[key], value) for key, value in expected.items())


def test_both_names_of_one_tensor(tmp_path):
    case, _ = save_form(tmp_path, FORMS["dora"], torch.float32)
    path = case.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    [first, *_] = sorted(tensors)
    save_file(
        tensors | {first.replace(".weight", ".default.weight"): tensors[first] * 2}, path, metadata={"format": "pt"}
    )
    with pytest.raises(ModelMergeError, match="stand for the same"):
        case.merge()
