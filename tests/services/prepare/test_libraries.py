"""Models that the libraries of their formats wrote: compressed-tensors itself, and bitsandbytes' files on a model of Conv1D."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE
from support import SUPPORT
from support.models.tiny_models import make_base

FIXTURES = SUPPORT / "models" / "quantized"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("dense") / "base")


def run(folder: Path, tmp_path: Path, **params):
    workdir = tmp_path / "work"
    workdir.mkdir()
    ctx = Context(workdir=workdir, log=logging.getLogger("test"))
    out = STAGE.run({"base": folder}, PrepareParams(**params), ctx)["base"]
    return out, load_file(out / "model.safetensors"), ctx.facts


SCHEMES = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "int4-asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "int8-asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "float8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "float8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True},
    ),
}


def compressed(dense: Path, folder: Path, name: str) -> Path:
    """The model, compressed and saved by the library, with one value range per group as a calibration would choose."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    stored_as, weights = SCHEMES[name]
    scheme = {"targets": ["Linear"], "weights": weights, "format": stored_as}
    if stored_as != "pack-quantized":
        scheme["input_activations"] = {**weights, "strategy": "token", "dynamic": True, "symmetric": True}
        scheme["input_activations"].pop("block_structure", None)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=stored_as)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            low, high = extremes(module.weight.float(), module.weight_scale.shape)
            scale, zero = calculate_qparams(low, high, module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def extremes(weight, scales):
    """Smallest and largest value of every part of a weight that shares a scale."""
    rows, columns = (scales[0], scales[1]) if len(scales) == 2 else (1, 1)
    parts = weight.reshape(rows, weight.shape[0] // rows, columns, weight.shape[1] // columns)
    return parts.amin((1, 3)).reshape(scales), parts.amax((1, 3)).reshape(scales)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_compressed_tensors_become_what_transformers_dequantizes_them_to(dense, tmp_path, name):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = compressed(dense, tmp_path / "compressed", name)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    out, found, facts = run(folder, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(**{**settings, "dequantize": True}), dtype=torch.bfloat16
    ).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert facts["method"] == f"compressed-tensors {SCHEMES[name][0]}"
    assert facts["computed"] == 14
    assert sorted(plain) == sorted(reference)
    for key, value in reference.items():
        # The library computes in bfloat16, here in float32: they differ by one rounding at most.
        torch.testing.assert_close(plain[key], value, rtol=2**-7, atol=0, msg=lambda text, key=key: f"{key}: {text}")
    original = load_file(dense / "model.safetensors")
    for key in found:
        if key.endswith("_proj.weight"):
            error = (found[key].float() - original[key]).norm() / original[key].norm()
            assert 0 < error < (0.2 if "int4" in name else 0.05), key


def test_two_schemes_in_one_model(dense, tmp_path):
    one, two = compressed(dense, tmp_path / "one", "int4-group"), compressed(dense, tmp_path / "two", "int8")
    tensors = {k: v for k, v in load_file(one / "model.safetensors").items() if ".layers.1." not in k}
    tensors |= {k: v for k, v in load_file(two / "model.safetensors").items() if ".layers.1." in k}
    save_file(tensors, one / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((one / "config.json").read_text())
    other = json.loads((two / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    config["quantization_config"]["config_groups"]["group_1"] = other | {"targets": ["re:.*layers.1.*"]}
    config["quantization_config"]["format"] = "mixed-precision"
    (one / "config.json").write_text(json.dumps(config))
    found = run(one, tmp_path)[1]
    (tmp_path / "work").rename(tmp_path / "first")
    expected = run(two, tmp_path)[1]
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize(
    "change",
    [{"transform_config": {"config_groups": {"a": {}}}}, {"sparsity_config": {"format": "sparse-24-bitmask"}}],
    ids=["rotated", "sparse"],
)
def test_what_the_library_would_not_undo_alone_is_refused(dense, tmp_path, change):
    folder = compressed(dense, tmp_path / "compressed", "int8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelExportError) as caught:
        run(folder, tmp_path)
    assert caught.value.reason == "BASE_QUANTIZATION_UNSUPPORTED"


def test_quantized_conv1d_weights_are_turned_back(tmp_path):
    """bitsandbytes stores GPT-2's transposed weights as (out, in); the dense model stores them as (in, out)."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32, n_inner=5)
    folder = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.mlp.c_proj.weight"  # (5, 32)
    fixture = load_file(FIXTURES / "bitsandbytes.safetensors")
    case = "nf4_nested_float16"
    weight = fixture[f"expected.{case}"]  # (5, 26)
    config = json.loads((folder / "config.json").read_text()) | {"n_embd": 26, "n_inner": 5}
    shutil.rmtree(folder)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    assert tensors.pop(name).shape == (26, 5)
    parts = {key.removeprefix(f"{case}.weight"): v for key, v in fixture.items() if key.startswith(f"{case}.weight")}
    save_file(tensors | {name + part: v for part, v in parts.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config))
    out, found, facts = run(folder, tmp_path, merge_onto="nf4")
    assert torch.equal(found[name], weight.T)
    assert facts["method"] == "bitsandbytes nf4"
    _, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.slow
def test_memory_stays_at_one_tensor(tmp_path):
    """Eight layers of 12 MB take no more anonymous memory than one."""
    import subprocess
    import sys

    script = (
        "import sys, logging, resource, threading, pathlib\n"
        "import torch, transformers\n"
        "from slipway.stage import Context\n"
        "from slipway_prepare.stage import STAGE, PrepareParams\n"
        "folder, work = map(pathlib.Path, sys.argv[1:])\n"
        "def anon():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')) // 1024\n"
        "peak = [0]\n"
        "def seen(p):\n"
        "    peak[0] = max(peak[0], anon())\n"
        "ctx = Context(workdir=work, log=logging.getLogger('x'), on_progress=seen)\n"
        "STAGE.run({'base': folder}, PrepareParams(merge_onto='nf4'), ctx)\n"
        "print(peak[0])\n"
    )
    peaks = {}
    for layers in (1, 8):
        folder = make_large(tmp_path / f"base-{layers}", layers)
        (tmp_path / f"work-{layers}").mkdir()
        arguments = [sys.executable, "-c", script, str(folder), str(tmp_path / f"work-{layers}")]
        peaks[layers] = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert peaks[8] < peaks[1] + 24, peaks


def make_large(folder: Path, layers: int) -> Path:
    """A Qwen3 with 12 MB of weights a layer."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=512, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
