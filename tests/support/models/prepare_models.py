"""Whole models in every form that the prepare stage accepts, stored by this file's own code, and the stage's results."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE


def configure(folder: Path, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | changes))


def linears(tensors):
    return sorted(name for name in tensors if name.endswith("_proj.weight"))


def run(folder: Path, tmp_path: Path, **params):
    workdir = tmp_path / "work"
    workdir.mkdir()
    ctx = Context(workdir=workdir, log=logging.getLogger("test"))
    out = STAGE.run({"base": folder}, PrepareParams(**params), ctx)["base"]
    assert base_format(ModelFolder.open(out)) == ""
    return out, load_all(out), ctx.facts


def load_all(folder: Path):
    merged = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged |= load_file(path)
    return merged


def refusal(folder: Path, tmp_path: Path, **params):
    with pytest.raises(ModelExportError) as caught:
        run(folder, tmp_path, **params)
    return caught.value


def stored(dense: Path, tmp_path: Path, tensors, quantization=None, **config) -> Path:
    folder = tmp_path / "stored"
    shutil.copytree(dense, folder)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, **({"quantization_config": quantization} if quantization else {}), **config)
    return folder


def loads(folder: Path):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all()
    return model


def pack_gptq(weight, group):
    """v1 files of 4 bits, packed value by value; return the parts and their dense weight."""
    outputs, inputs = weight.shape
    grouped = weight.float().reshape(outputs, inputs // group, group)
    scales = ((grouped.amax(2) - grouped.amin(2)) / 15).half().T.contiguous()  # (groups, outputs)
    zeros = (-grouped.amin(2) / scales.T.float()).round().clamp(1, 15).int().T
    codes = (
        (weight.float().T / scales.repeat_interleave(group, 0) + zeros.repeat_interleave(group, 0)).round().clamp(0, 15)
    )
    qweight, qzeros = (
        torch.zeros(inputs // 8, outputs, dtype=torch.int64),
        torch.zeros(len(zeros), outputs // 8, dtype=torch.int64),
    )
    for row in range(inputs):
        qweight[row // 8] |= codes[row].long() << (4 * (row % 8))
    for column in range(outputs):
        qzeros[:, column // 8] |= (zeros[:, column].long() - 1) << (4 * (column % 8))
    dense = (codes - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    parts = {
        "qweight": wrap(qweight),
        "qzeros": wrap(qzeros),
        "scales": scales,
        "g_idx": (torch.arange(inputs) // group).int(),
    }
    return parts, dense.T


def wrap(words):
    return torch.where(words >= 2**31, words - 2**32, words).int()


def pickled(dense: Path, tmp_path: Path, *, shards: int = 1, tie: bool = True) -> Path:
    """Store the dense model as pickles instead, with its tie in one of them."""
    folder = tmp_path / "pickled"
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if tie:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = sorted(tensors)
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        torch.save(part, folder / f"pytorch_model-{number}.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
