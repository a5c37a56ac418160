"""A small dense model, and the same model stored in 4 bits."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from support.models.prepare_models import configure, linears, pack_gptq, stored
from support.models.tiny_models import make_base


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """A Qwen3 of two layers in bfloat16."""
    folder = make_base(tmp_path_factory.mktemp("dense") / "base")
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, dtype="bfloat16")
    return folder


@pytest.fixture
def gptq(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    expected = dict(tensors)
    for name in linears(tensors):
        parts, dense_weight = pack_gptq(tensors.pop(name), 32)
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        expected[name] = dense_weight.bfloat16()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    return stored(dense, tmp_path, tensors, settings), tensors, expected, settings
