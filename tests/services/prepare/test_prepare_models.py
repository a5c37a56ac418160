"""Whole models: stored in every form by code of this file's own, prepared, and loaded by transformers."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.base_format import base_format
from slipway.errors import ModelExportError
from slipway.safetensors_file import read_weights
from slipway.stage import Context
from slipway_prepare.nf4_round_trip import nf4_round_trip
from slipway_prepare.stage import STAGE, PrepareParams
from tiny_models import make_base


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Qwen3 of two layers in bfloat16."""
    folder = make_base(tmp_path_factory.mktemp("dense") / "base")
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, dtype="bfloat16")
    return folder


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
    assert base_format(out) == ""
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


# Pickles


def pickled(dense: Path, tmp_path: Path, *, shards: int = 1, tie: bool = True) -> Path:
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


def test_a_pickle_with_ties_becomes_what_transformers_saves(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    assert base_format(folder) == "pickle"
    out, tensors, facts = run(folder, tmp_path)
    expected = load_file(dense / "model.safetensors")
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert facts["source"] == "pickle"
    assert (out / "tokenizer.json").is_file()
    assert not list(out.glob("*.bin*"))
    loads(out)


def test_shards_of_pickles_become_shards_of_safetensors(dense, tmp_path):
    out, tensors, _ = run(pickled(dense, tmp_path, shards=3, tie=False), tmp_path, max_shard_bytes=60_000)
    expected = load_file(dense / "model.safetensors")
    assert len(list(out.glob("*.safetensors"))) > 2
    assert sorted(read_weights(out)) == sorted(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    loads(out)


def families():
    import transformers

    half = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    pair = {"d_model": 32, "vocab_size": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, **half}
    return {
        "bert": (transformers.BertForMaskedLM, {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}),
        "gpt2": (transformers.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}),
        "marian": (transformers.MarianMTModel, {**pair, "decoder_start_token_id": 0}),
        "t5": (transformers.T5ForConditionalGeneration, {"d_model": 32, "num_layers": 1, "vocab_size": 64, "d_ff": 64}),
        "whisper": (transformers.WhisperForConditionalGeneration, {**pair, "decoder_start_token_id": 1}),
    }


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian", "t5", "whisper"])
def test_other_architectures_with_the_ties_of_their_classes(tmp_path, family):
    cls, settings = families()[family]
    model = cls(cls.config_class(**settings))
    model.save_pretrained(tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "model.safetensors").unlink()
    torch.save({k: v for k, v in model.state_dict().items() if k in expected or "embed_positions" not in k},
               tmp_path / "saved" / "pytorch_model.bin")  # fmt: skip
    out, found, _ = run(tmp_path / "saved", tmp_path)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    _, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    torch.save({"a": Payload(tmp_path / "executed")}, folder / "pytorch_model.bin")
    assert refusal(folder, tmp_path).reason == "UNSAFE_PICKLE"
    assert not (tmp_path / "executed").exists()


def test_a_pickle_of_an_old_format_is_refused_with_what_helps(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    error = refusal(folder, tmp_path)
    assert (error.reason, "torch.save(torch.load(f, weights_only=True), f)" in error.remedy) == ("UNSAFE_PICKLE", True)


@pytest.mark.parametrize(
    "content",
    [{"a": 1}, [torch.zeros(1)], {3: torch.zeros(1), "a": torch.zeros(1)}],
    ids=["number", "list", "mixed-names"],
)
def test_a_pickle_of_something_else_is_refused(dense, tmp_path, content):
    folder = pickled(dense, tmp_path)
    torch.save(content, folder / "pytorch_model.bin")
    assert refusal(folder, tmp_path).reason == "BASE_MODEL_INVALID"


def test_a_damaged_pickle_is_refused(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(folder, tmp_path).reason in {"BASE_MODEL_INVALID", "UNSAFE_PICKLE"}


@pytest.mark.parametrize("length", [1, 2, 3, 10, 45, 300])
def test_an_instruction_stream_cut_short_is_refused(dense, tmp_path, length):
    path = pickled(dense, tmp_path) / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:length] if name.endswith("data.pkl") else content)
    assert refusal(path.parent, tmp_path).reason in {"BASE_MODEL_INVALID", "UNSAFE_PICKLE"}


# 8-bit floats


def test_stacked_experts_are_not_taken_without_their_scales(dense, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = {name: torch.randn(2, 4, 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((2, 1, 1), 3.0)}
    folder = stored(dense, tmp_path, load_file(dense / "model.safetensors") | experts, {"quant_method": "fp8"})
    assert refusal(folder, tmp_path).about["tensor"].startswith(name)


def test_blocks_of_8_bit_floats_match_transformers_own(dense, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = load_file(dense / "model.safetensors")
    expected = dict(tensors)
    for name in linears(tensors):
        rows, columns = tensors[name].shape
        scale = torch.rand(rows // 32, columns // 32) * 0.01 + 0.001
        weight = (tensors[name].float() / scale.repeat_interleave(32, 0).repeat_interleave(32, 1)).to(
            torch.float8_e4m3fn
        )
        tensors[name], tensors[f"{name}_scale_inv"] = weight, scale
        expected[name] = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    folder = stored(dense, tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    out, found, facts = run(folder, tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(found) == sorted(expected)
    assert facts["method"] == "fp8"
    assert "dequantized to bfloat16" in facts["warnings"][0]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    loads(out)


def test_a_last_block_may_be_shorter(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    name = linears(tensors)[0]
    rows, columns = tensors[name].shape
    scale = torch.rand(-(-rows // 48), -(-columns // 48))
    tensors[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scale
    folder = stored(dense, tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [48, 48]})
    spread = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    assert torch.equal(run(folder, tmp_path)[1][name], (tensors[name].float() * spread).bfloat16())


@pytest.mark.parametrize("shape", ["tensor", "row", "none"])
def test_one_scale_a_row_of_scales_or_none(dense, tmp_path, shape):
    tensors = load_file(dense / "model.safetensors")
    name = linears(tensors)[0]
    weight = torch.randn(tensors[name].shape).to(torch.float8_e4m3fn)
    scale = {"tensor": torch.tensor([0.25]), "row": torch.rand(len(weight), 1), "none": torch.tensor(1.0)}[shape]
    tensors[name] = weight
    tensors |= {} if shape == "none" else {f"{name}_scale": scale}
    quantization = {"row": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}.get(shape)
    folder = stored(dense, tmp_path, tensors, quantization)
    assert base_format(folder) in {"fp8", "fbgemm_fp8"}
    assert torch.equal(run(folder, tmp_path)[1][name], (weight.float() * scale).bfloat16())


# Quantized


def pack_gptq(weight, group):
    """v1 files of 4 bits, packed value by value; answers the parts and the dense weight they stand for."""
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


def test_zero_points_that_fill_no_whole_words_are_refused(gptq, dense, tmp_path):
    _, tensors, _, settings = gptq
    module = next(name for name in sorted(tensors) if name.endswith(".qweight")).removesuffix(".qweight")
    cut = {f"{module}.{part}": tensors[f"{module}.{part}"][:, :-4] for part in ("qweight", "scales")}
    shutil.rmtree(tmp_path / "stored")
    error = refusal(stored(dense, tmp_path, tensors | cut, settings), tmp_path)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", f"{module}.qweight")


def test_a_gptq_model_becomes_dense(gptq, tmp_path):
    folder, _, expected, _ = gptq
    out, found, facts = run(folder, tmp_path)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (facts["method"], facts["computed"]) == ("gptq", len(linears(expected)))
    assert facts["details"]["bits"] == 4
    loads(out)


def test_every_missing_part_and_every_part_left_over_is_named(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    victim = linears(expected)[0].removesuffix(".weight")
    for part in ("qweight", "qzeros", "scales"):
        folder = tmp_path / part
        rest = {name: value for name, value in tensors.items() if name != f"{victim}.{part}"}
        error = refusal(stored(dense, folder, rest, settings), folder)
        assert error.reason == "BASE_MODEL_INVALID"
        assert victim in str(error)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "hqq"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "awq", "version": "gemv"}, "BASE_QUANTIZATION_UNSUPPORTED"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "BASE_MODEL_INVALID"),
        ({"quant_method": "bitsandbytes"}, "BASE_MODEL_INVALID"),
    ],
    ids=["unknown", "marlin", "gemv", "groups", "other-method"],
)
def test_another_method_is_refused_with_its_name(gptq, dense, tmp_path, settings, reason):
    error = refusal(stored(dense, tmp_path / "again", gptq[1], settings), tmp_path)
    assert error.reason == reason
    assert error.remedy


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    name = linears(expected)[0].removesuffix("weight") + "scales"
    error = refusal(stored(dense, tmp_path / "again", tensors | {name: tensors[name][:, :-1]}, settings), tmp_path)
    assert error.reason == "BASE_MODEL_INVALID"
    assert not (tmp_path / "work" / "base").exists()


def test_a_missing_tensor_is_found_by_the_models_class(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors.pop("model.norm.weight")
    error = refusal(stored(dense, tmp_path, tensors), tmp_path, merge_onto="nf4")
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", "model.norm.weight")


def test_infinity_is_refused(gptq, dense, tmp_path):
    _, tensors, expected, settings = gptq
    name = linears(expected)[0].removesuffix("weight") + "scales"
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    error = refusal(stored(dense, tmp_path / "again", tensors, settings), tmp_path)
    assert error.reason == "NON_FINITE_WEIGHTS"


def test_a_full_disk_is_typed(dense, tmp_path, small_disk):
    folder = stored(dense, tmp_path, load_file(dense / "model.safetensors"))
    padding = small_disk / "padding"
    free = shutil.disk_usage(small_disk).free
    padding.write_bytes(bytes(max(0, free - 100_000)))
    ctx = Context(workdir=small_disk, log=logging.getLogger("test"))
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"base": folder}, PrepareParams(merge_onto="nf4"), ctx)
    assert caught.value.reason == "DISK_FULL"


def test_cancellation_ends_it(dense, tmp_path):
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    seen = []

    def cancel(progress):
        seen.append(progress)
        ctx.cancelled.set()

    ctx.on_progress = cancel
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"base": dense}, PrepareParams(merge_onto="nf4"), ctx)
    assert caught.value.reason == "CANCELLED"
    assert len(seen) == 1


# The NF4 round trip


def test_the_nf4_round_trip_takes_the_layers_that_load_in_4bit_takes(dense, tmp_path):
    out, found, facts = run(dense, tmp_path, merge_onto="nf4")
    expected = load_file(dense / "model.safetensors")
    for name, value in expected.items():
        wanted = nf4_round_trip(value) if name in linears(expected) else value
        assert torch.equal(found[name], wanted), name
        assert torch.equal(found[name], value) == (name not in linears(expected))
    assert (facts["merge_onto"], facts["computed"]) == ("nf4", len(linears(expected)))
    assert "NF4" in facts["warnings"][0]
    loads(out)


def test_the_nf4_round_trip_of_another_quantization_is_refused(gptq, tmp_path):
    error = refusal(gptq[0], tmp_path, merge_onto="nf4")
    assert error.reason == "BASE_QUANTIZATION_UNSUPPORTED"
    assert "original" in error.remedy
