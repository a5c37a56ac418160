"""Bases of every family in the forms that are prepared: pickles, packed integers, NF4, and plain ones that are exported as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from slipway.model.model_files import model_files
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from support.models.family_models import CASES, given_by, make_family_model
from support.models.prepare_models import refusal, run

KINDS = sorted(CASES)
SOME = ("gpt2", "marian", "t5", "whisper", "roberta-classes", "bert-masked")


def loaded(kind: str, folder: Path):
    model, info = type(CASES[kind].model()).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def pickled(kind: str, folder: Path) -> Path:
    """The model as ``torch.save`` of its state dict: with each tied tensor under all of its names."""
    model = loaded(kind, folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_is_the_same_model(tmp_path, kind):
    source = make_family_model(kind, tmp_path / "source")
    expected = given_by(loaded(kind, source), kind)
    out, _, _ = run(pickled(kind, source), tmp_path)
    assert torch.equal(given_by(loaded(kind, out), kind), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_is_the_same_one_in_a_clean_folder(tmp_path, kind):
    source = make_family_model(kind, tmp_path / "source", dtype=torch.bfloat16)
    (source / "generation_config.json").write_text("{}")
    for left in ("optimizer.pt", "trainer_state.json", "modeling_other.py"):
        (source / left).write_bytes(b"left over")
    config = json.loads((source / "config.json").read_text()) | {"_name_or_path": "/home/somebody/model"}
    (source / "config.json").write_text(json.dumps(config))
    out, tensors, _ = run(source, tmp_path)
    before = load_file(source / "model.safetensors")
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in model_files(source)}
    assert "somebody" not in (out / "config.json").read_text()
    assert torch.equal(given_by(loaded(kind, out).float(), kind), given_by(loaded(kind, source).float(), kind))


def test_the_tokenizer_is_left_out_where_it_is_not_wanted(tmp_path):
    out, _, _ = run(make_family_model("marian", tmp_path / "source"), tmp_path, save_tokenizer=False)
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("level", ["int8", "int4"])
def test_packed_integers_are_unpacked(tmp_path, kind, level):
    """What the quantize stage writes is what compressed-tensors does."""
    source = make_family_model(kind, tmp_path / "source")
    (tmp_path / "packing").mkdir()
    params = QuantizeParams(format="pytorch", level=level)
    packed = QUANTIZE.run({"model": source}, params, Context(workdir=tmp_path / "packing"))["model"]
    (packed / "quantization.json").unlink()
    assert base_format(ModelFolder.open(packed)) == "compressed-tensors"
    expected = given_by(loaded(kind, packed), kind)
    out, _, facts = run(packed, tmp_path)
    assert facts["computed"] > 3
    assert (given_by(loaded(kind, out).float(), kind) - expected).abs().max() < 0.05 * expected.std()  # in bfloat16


@pytest.mark.parametrize("kind", SOME)
def test_the_round_trip_to_nf4_changes_linear_layers_and_no_embedding(tmp_path, kind):
    source = make_family_model(kind, tmp_path / "source", dtype=torch.bfloat16)
    out, tensors, facts = run(source, tmp_path, merge_onto="nf4")
    before = load_file(source / "model.safetensors")
    changed = {name for name in before if not torch.equal(tensors[name], before[name])}
    assert facts["computed"] == len(changed) > 3
    heads = ("lm_head", "cls.predictions.decoder")  # tied to the embedding; load_in_4bit does quantize a classifier's
    assert not any("embed" in name or "wte" in name or name.startswith(heads) for name in changed)
    difference = given_by(loaded(kind, out).float(), kind) - given_by(loaded(kind, source).float(), kind)
    assert 0 < difference.abs().max() < 3


@pytest.mark.parametrize("kind", ["marian", "bert-classes"])
def test_a_model_that_lacks_a_weight_is_refused_by_its_name(tmp_path, kind):
    source = make_family_model(kind, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("weight") and "norm" not in name.lower())
    shutil.copytree(source, tmp_path / "less")
    save_file(
        {k: v for k, v in tensors.items() if k != name}, tmp_path / "less" / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(Exception, match=name.replace(".", r"\.")) as caught:
        run(tmp_path / "less", tmp_path)
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize("kind", ["distilbert-classes", "bert-features"])
def test_a_pickle_whose_configuration_names_no_class_is_prepared(tmp_path, kind):
    """DeBERTa v3 lies on the hub like this; what is trained on it decides the class."""
    source = make_family_model(kind, tmp_path / "source")
    expected = load_file(source / "model.safetensors")
    pickled(kind, source)
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config))
    refused = refusal(source, tmp_path, merge_onto="nf4")
    assert "names no class" in str(refused)
    shutil.rmtree(tmp_path / "work")
    _, tensors, _ = run(source, tmp_path)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
