"""The pooling of a sentence encoder: read from its files, computed as by hand, refused by name where it is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.model_files import companion_files, model_files
from slipway.model.sentences import (
    MODES,
    Pooling,
    UnknownPoolingError,
    load_pooling,
    pool,
    read_pooling,
    sentence_files,
)
from support.models.sentence_models import write_dense, write_modules

HIDDEN = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])


def by_hand(row: torch.Tensor, mode: str) -> torch.Tensor:
    """The vector of one text without padding."""
    places = torch.arange(1, len(row) + 1).float()
    return {
        "cls": row[0],
        "lasttoken": row[-1],
        "max": row.max(dim=0).values,
        "mean": row.mean(dim=0),
        "mean_sqrt_len_tokens": row.sum(dim=0) / len(row) ** 0.5,
        "weightedmean": (row * places[:, None]).sum(dim=0) / places.sum(),
    }[mode]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_takes_the_tokens_alone(mode: str, normalized: bool) -> None:
    found = pool(HIDDEN, MASK, Pooling((mode,), normalized))
    for row, mask, vector in zip(HIDDEN, MASK, found, strict=True):
        wanted = by_hand(row[mask.bool()], mode)
        assert torch.allclose(vector, wanted / wanted.norm() if normalized else wanted, atol=1e-6)


def test_several_modes_are_joined_in_order() -> None:
    found = pool(HIDDEN, MASK, Pooling(("cls", "mean"), normalized=False))
    assert torch.equal(found[:, :4], pool(HIDDEN, MASK, Pooling(("cls",), normalized=False)))
    assert torch.equal(found[:, 4:], pool(HIDDEN, MASK, Pooling(("mean",), normalized=False)))


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
        ({}, ("mean",)),
    ],
)
def test_both_ways_to_write_the_mode_are_read(tmp_path: Path, settings: dict[str, Any], modes: tuple[str, ...]) -> None:
    write_modules(tmp_path, settings=settings, normalized=True)
    assert read_pooling(tmp_path) == Pooling(modes, normalized=True)
    write_modules(tmp_path, settings=settings, normalized=False)
    assert read_pooling(tmp_path) == Pooling(modes, normalized=False)


def test_a_checkpoint_s_pooling_goes_before_the_base_s(tmp_path: Path) -> None:
    write_modules(tmp_path / "base", settings={"pooling_mode": "mean"})
    write_modules(tmp_path / "adapter", settings={"pooling_mode": "cls"})
    (tmp_path / "plain").mkdir()
    assert read_pooling(tmp_path / "plain") is None
    assert read_pooling(None, tmp_path / "base") == Pooling(("mean",), normalized=False)
    assert read_pooling(tmp_path / "plain", tmp_path / "base") == Pooling(("mean",), normalized=False)
    assert read_pooling(tmp_path / "adapter", tmp_path / "base") == Pooling(("cls",), normalized=False)


@pytest.mark.parametrize(
    ("modules", "settings", "says"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "the weights of 2_Dense cannot be read"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {}, "Dense"),
        (["Transformer", "WordWeights", "Pooling"], {}, "WordWeights"),
        (["Transformer", "Normalize", "Pooling"], {}, "another order"),
        (["Transformer"], {}, "another order"),
        (["CLIPModel"], {}, "does not begin with a transformer"),
        ([], {}, "does not begin with a transformer"),
        (["Transformer", "Pooling"], {"pooling_mode": "attention"}, "attention"),
        (["Transformer", "Pooling"], {"pooling_mode": 7}, "7"),
        (["Transformer", "Pooling"], {"pooling_mode": []}, "not known"),
        (["Transformer", "Pooling"], {"pooling_mode": [[]]}, "not known"),
        (["Transformer", "Pooling"], {"include_prompt": False}, "prompt"),
    ],
)
def test_another_pooling_is_refused_by_name(
    tmp_path: Path, modules: list[str], settings: dict[str, Any], says: str
) -> None:
    write_modules(tmp_path, modules=modules, settings=settings)
    with pytest.raises(UnknownPoolingError, match=says):
        read_pooling(tmp_path)


def test_modules_that_a_checkpoint_lists_and_does_not_have_are_the_base_s(tmp_path: Path) -> None:
    """peft saves the list beside an adapter, and no module."""
    modules = ["Transformer", "Pooling", "Dense"]
    base = write_modules(tmp_path / "base", modules=modules, settings={"pooling_mode": "cls"})
    write_dense(base / "2_Dense", (4, 6), bias=False, seed=1)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "modules.json").write_text((base / "modules.json").read_text())
    found = read_pooling(tmp_path / "adapter", base)
    assert found is not None
    assert (found.modes, found.layers[0].file) == (("cls",), base / "2_Dense" / "model.safetensors")


def test_linear_layers_behind_the_pooling_are_computed(tmp_path: Path) -> None:
    modules = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    write_modules(tmp_path, modules=modules, dense={"activation_function": "torch.nn.modules.linear.Identity"})
    first = write_dense(tmp_path / "2_Dense", (4, 6), bias=True, seed=1)
    second = write_dense(tmp_path / "3_Dense", (6, 3), bias=False, seed=2)
    pooling = load_pooling(tmp_path)
    assert pooling is not None
    assert (pooling.width(4), pooling.normalized) == (3, True)
    mean = pool(HIDDEN, MASK, Pooling(("mean",), normalized=False))
    wanted = (mean @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    torch.testing.assert_close(pool(HIDDEN, MASK, pooling), torch.nn.functional.normalize(wanted))
    assert {path.name for path in sentence_files(tmp_path)} >= {"model.safetensors"}


@pytest.mark.parametrize(
    ("dense", "spoil", "says"),
    [
        ({"activation_function": "torch.nn.Bilinear"}, "", "activation Bilinear of 2_Dense"),
        ({}, "shape", "does not have the weights of a linear layer"),
        ({}, "bytes", "the weights of 2_Dense cannot be read"),
        ({"module_input_name": "token_embeddings"}, "", "something else than the sentence embedding"),
        ({"module_output_name": "projected"}, "", "something else than the sentence embedding"),
        ({"use_residual": True}, "", "2_Dense adds its inputs to its results"),
    ],
)
def test_a_linear_layer_that_is_not_understood_is_refused(
    tmp_path: Path, dense: dict[str, Any], spoil: str, says: str
) -> None:
    write_modules(tmp_path, modules=["Transformer", "Pooling", "Dense"], dense=dense)
    write_dense(tmp_path / "2_Dense", (4, 6), bias=False, seed=1)
    if spoil == "shape":
        save_file({"linear.weight": torch.zeros(4)}, tmp_path / "2_Dense" / "model.safetensors")
    if spoil == "width":
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 5}))
    if spoil == "bytes":
        (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnknownPoolingError, match=says):
        read_pooling(tmp_path)


def test_linear_layers_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, modules=["Transformer", "Pooling", "Dense", "Dense"], dense={"module_output_name": None})
    for place, sizes in (("2_Dense", (4, 6)), ("3_Dense", (4, 3))):
        write_dense(tmp_path / place, sizes, bias=False, seed=1)
    with pytest.raises(UnknownPoolingError, match="a Dense takes"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "[null]", '[{"type": 1, "path": ""}]', '[{"type": "a"}]', "[" * 100_000, "[]" * 30, "\\udcff"],
)
def test_a_list_of_modules_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnknownPoolingError):
        read_pooling(tmp_path)
    assert sentence_files(tmp_path) == [tmp_path / "modules.json"]


@pytest.mark.parametrize("path", ["..", "/etc", "../secret", "a/b", "a\0b", ".", "x" * 200])
def test_a_module_elsewhere_is_not_read(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "model"
    write_modules(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("{}")
    with pytest.raises(UnknownPoolingError, match="not a folder beside it"):
        read_pooling(folder)
    assert {file.name for file in sentence_files(folder)} == {"modules.json", "sentence_bert_config.json"}


def test_the_files_travel_with_the_model(tmp_path: Path) -> None:
    write_modules(tmp_path, modules=["Transformer", "Pooling", "Dense"])
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"weights of its own")
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "3_Other").mkdir()
    (tmp_path / "3_Other" / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    names = {path.relative_to(tmp_path).as_posix() for path in companion_files(tmp_path)}
    assert names == {
        *("config.json", "modules.json", "sentence_bert_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    assert {path.relative_to(tmp_path).as_posix() for path in model_files(tmp_path)} == {*names, "model.safetensors"}


@pytest.mark.parametrize(
    ("named", "modules", "used"),
    [
        ("MPNetForMaskedLM", ["Transformer", "Pooling", "Normalize"], "MPNetModel"),
        ("Qwen3ForCausalLM", ["Transformer", "Pooling", "Normalize"], "Qwen3Model"),
        ("BertForMaskedLM", ["Transformer", "Pooling", "Dense"], "BertModel"),
        ("BertModel", ["Transformer", "Pooling"], "BertModel"),
        ("BertForMaskedLM", ["MLMTransformer", "SpladePooling"], "BertForMaskedLM"),
        ("Qwen3ForCausalLM", ["Transformer", "LogitScore"], "Qwen3ForCausalLM"),
        ("BertForSequenceClassification", ["Transformer", "Pooling"], "BertForSequenceClassification"),
        ("BertForMaskedLM", None, "BertForMaskedLM"),
    ],
)
def test_a_sentence_encoder_is_of_the_class_that_is_used(
    tmp_path: Path, named: str, modules: list[str] | None, used: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [named], "model_type": "bert", "vocab_size": 9}))
    if modules:
        write_modules(tmp_path, modules=modules)
    assert ModelConfig.read(tmp_path)["architectures"] == [used]
    family = ModelConfig.read(tmp_path).family
    assert (family is FEATURE_EXTRACTION) is used.endswith("Model")


def test_a_list_of_modules_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    (tmp_path / "modules.json").write_text("[")
    assert ModelConfig.read(tmp_path)["architectures"] == ["BertForMaskedLM"]
