"""Bases that are pickles, prepared and loaded by transformers; what could run code, or is damaged, is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prepare_models import loads, refusal, run
from slipway.base_format import base_format
from slipway.safetensors_file import read_weights


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
