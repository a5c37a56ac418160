"""What the weights of a base model tell: it is the adapter's own, another one, or nothing; each by real folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.base_match import BaseMatchStatus
from slipway.base_match.evidence import misfit
from slipway.errors import CheckpointValidationError
from support.models.headless_bases import make_headless
from support.models.matched_models import (
    CONFIG,
    HIDDEN,
    VOCABULARY,
    WIDE,
    judge,
    make_adapter,
    make_model,
    make_tokenizer,
    weights,
)


def copied(folder: Path) -> Path:
    return make_model(folder)


def linked(folder: Path) -> Path:
    shutil.copytree(folder.parent / "base", folder, copy_function=os.link)
    return folder


def in_bfloat16(folder: Path) -> Path:
    return make_model(folder, {name: tensor.bfloat16() for name, tensor in weights().items()})


def in_float16(folder: Path) -> Path:
    return make_model(folder, {name: tensor.half() for name, tensor in weights().items()})


def in_shards(folder: Path) -> Path:
    make_model(folder)
    (folder / "model.safetensors").unlink()
    index = {}
    for number, (name, tensor) in enumerate(weights().items()):
        shard = f"model-{number % 2}.safetensors"
        index[name] = shard
        path = folder / shard
        save_file({**(load_file(path) if path.exists() else {}), name: tensor}, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def with_its_head(folder: Path) -> Path:
    return make_model(folder, weights() | {"lm_head.weight": weights()["model.embed_tokens.weight"].clone()})


def with_more_tokens(folder: Path) -> Path:
    tensors = weights()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(8, HIDDEN)])
    return make_model(folder, tensors, vocab_size=VOCABULARY + 8)


@pytest.mark.parametrize("make", [copied, linked, in_bfloat16, in_float16, in_shards, with_its_head, with_more_tokens])
def test_the_same_weights_under_another_name_confirm_the_base(
    adapter: Path, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    found = judge(make(tmp_path / "another-name"), adapter)
    assert (found.status, found.verdict) == (BaseMatchStatus.CONFIRMED, "green"), found.reason


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_one_16_bit_type_made_from_the_other_is_the_same_model(tmp_path: Path, dtypes: tuple) -> None:
    first, second = dtypes
    stored = {name: tensor.to(first) for name, tensor in weights().items()}
    make_model(tmp_path / "base", stored)
    made = {name: tensor.to(second) for name, tensor in stored.items()}
    used = make_model(tmp_path / "converted", made)
    assert judge(used, make_adapter(tmp_path / "run" / "checkpoint-1")).status is BaseMatchStatus.CONFIRMED


def other_kind(folder: Path) -> Path:
    return make_model(folder, model_type="mistral", architectures=["MistralForCausalLM"])


def other_weights(folder: Path) -> Path:
    return make_model(folder, weights(seed=7))


def other_weights_in_bfloat16(folder: Path) -> Path:
    return make_model(folder, {name: (tensor * 1.01).bfloat16() for name, tensor in weights().items()})


def one_other_layer(folder: Path) -> Path:
    return make_model(folder, weights() | {"model.layers.1.mlp.down_proj.weight": torch.zeros(HIDDEN, WIDE)})


def other_tokenizer(folder: Path) -> Path:
    make_model(folder, weights(seed=7), quantization_config={"quant_method": "gptq"})
    make_tokenizer(folder, first=5)
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (other_kind, "model_type is 'mistral' (MistralForCausalLM) and not 'qwen3' (Qwen3ForCausalLM)"),
        (other_weights, "has other values"),
        (other_weights_in_bfloat16, "has other values"),
        (one_other_layer, "model.layers.1.mlp.down_proj.weight"),
        (other_tokenizer, "tokenizer"),
    ],
)
def test_another_base_is_refused_and_both_are_named(
    adapter: Path, tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    used = make(tmp_path / "elsewhere" / "base")  # its folder has the recorded name
    with pytest.raises(CheckpointValidationError) as error:
        judge(used, adapter)
    assert error.value.reason == "BASE_MODEL_MISMATCH"
    assert [text for text in (says, str(used), str(tmp_path / "base")) if text not in error.value.message] == []
    assert [
        text for text in ("base_model.name", "--base-model", "base_model.trust") if text not in error.value.remedy
    ] == []


def test_trust_takes_another_base_in_amber(adapter: Path, tmp_path: Path) -> None:
    found = judge(other_weights(tmp_path / "other"), adapter, trust=True)
    assert (found.status, found.verdict) == (BaseMatchStatus.TRUSTED, "amber")
    assert "has other values" in found.reason


def test_the_recorded_folder_itself_proves_nothing(adapter: Path, tmp_path: Path) -> None:
    found = judge(tmp_path / "base", adapter)
    assert (found.status, found.verdict) == (BaseMatchStatus.UNPROVEN, "amber")
    assert "only that name" in found.reason
    assert str(tmp_path) not in found.reason


def missing(tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "base")
    return make_model(tmp_path / "used")


def recorded_is_quantized(tmp_path: Path) -> Path:
    config = CONFIG | {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return make_model(tmp_path / "used", weights(seed=3))


def recorded_is_a_pickle(tmp_path: Path) -> Path:
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    return make_model(tmp_path / "used")


def recorded_has_no_weights(tmp_path: Path) -> Path:
    (tmp_path / "base" / "model.safetensors").unlink()
    return make_model(tmp_path / "used")


def recorded_is_cut_short(tmp_path: Path) -> Path:
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return make_model(tmp_path / "used")


def recorded_config_is_a_pipe(tmp_path: Path) -> Path:
    (tmp_path / "base" / "config.json").unlink()
    os.mkfifo(tmp_path / "base" / "config.json")
    return make_model(tmp_path / "used")


def recorded_config_is_huge(tmp_path: Path) -> Path:
    with (tmp_path / "base" / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    return make_model(tmp_path / "used")


def only_the_vocabulary_differs(tmp_path: Path) -> Path:
    tensors = weights()
    tensors["model.embed_tokens.weight"][0] = 0
    return make_model(tmp_path / "used", tensors)


def test_weights_that_are_near_and_no_rounding_of_each_other_are_other_weights(adapter: Path, tmp_path: Path) -> None:
    near = {name: tensor * (1 + 1e-3) for name, tensor in weights().items()}
    with pytest.raises(CheckpointValidationError) as caught:
        judge(make_model(tmp_path / "used", near), adapter)
    assert caught.value.reason == "BASE_MODEL_MISMATCH"


def test_what_a_model_computes_itself_tells_nothing_of_its_weights(tmp_path: Path) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    make_model(tmp_path / "base", weights() | buffers)
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    others = buffers | {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e9)}
    others["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 1.0001)
    assert judge(make_model(tmp_path / "used", weights() | others), adapter).status is BaseMatchStatus.CONFIRMED


def test_a_folder_in_the_current_one_is_no_evidence_against_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tmp_path / "far" / "off" / "from" / "run" / "checkpoint-1")
    make_model(tmp_path / "here" / "base", weights(seed=5))
    monkeypatch.chdir(tmp_path / "here")
    found = judge(make_model(tmp_path / "used"), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN
    assert "current folder" in found.reason


def test_a_vocabulary_that_the_configuration_hides_may_be_resized(tmp_path: Path) -> None:
    hidden = {"vocab_size": None, "llm_config": {"vocab_size": VOCABULARY}}
    make_model(tmp_path / "base", **hidden)
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    tensors = weights()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(8, HIDDEN)])
    assert judge(make_model(tmp_path / "used", tensors, **hidden), adapter).status is BaseMatchStatus.CONFIRMED


def layers_in_8_bit(tmp_path: Path) -> Path:
    """Only the norms can be compared, which siblings share."""
    tensors = {n: t if "norm" in n else t.to(torch.float8_e4m3fn) for n, t in weights(seed=4).items()}
    return make_model(tmp_path / "used", tensors | {"model.norm.weight": weights()["model.norm.weight"]})


def rounded_twice(tmp_path: Path) -> Path:
    """One original's copy in float16 beside its copy in bfloat16, and back in float32."""
    save_file({n: t.bfloat16().float() for n, t in weights().items()}, tmp_path / "base" / "model.safetensors")
    return make_model(tmp_path / "used", {n: t.half() for n, t in weights().items()})


def rounded_and_back(tmp_path: Path) -> Path:
    return make_model(tmp_path / "used", {n: t.bfloat16().float() for n, t in weights().items()})


@pytest.mark.parametrize(
    "change",
    [
        rounded_twice,
        rounded_and_back,
        layers_in_8_bit,
        missing,
        recorded_is_quantized,
        recorded_is_a_pickle,
        recorded_has_no_weights,
        recorded_is_cut_short,
        recorded_config_is_a_pipe,
        recorded_config_is_huge,
        only_the_vocabulary_differs,
    ],
)
def test_what_cannot_be_compared_gets_no_verdict(adapter: Path, tmp_path: Path, change: Callable[[Path], Path]) -> None:
    found = judge(change(tmp_path), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN, found.reason
    assert "'base'" in found.reason


def test_a_bucket_is_compared_by_headers_alone(adapter: Path, tmp_path: Path) -> None:
    """The contents of its weights are holes here."""
    used = make_model(tmp_path / "used", {name: torch.zeros_like(tensor) for name, tensor in weights().items()})
    assert judge(used, adapter, contents=False).status is BaseMatchStatus.UNPROVEN
    wrong = make_model(tmp_path / "wrong", model_type="llama")
    with pytest.raises(CheckpointValidationError, match="model_type"):
        judge(wrong, adapter, contents=False)


def test_a_large_model_is_sampled_and_not_read(tmp_path: Path) -> None:
    """Files of 64 GiB, all of it holes: reading them would take minutes."""
    for folder in (tmp_path / "base", tmp_path / "used"):
        make_model(folder)
        header = {
            f"model.layers.{n}.mlp.up_proj.weight": {
                "dtype": "BF16",
                "shape": [1 << 17, 1 << 14],
                "data_offsets": [n << 32, (n + 1) << 32],
            }
            for n in range(16)
        }
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (16 << 32))
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", layers=0)
    assert judge(tmp_path / "used", adapter).status is BaseMatchStatus.CONFIRMED


def test_a_head_for_other_labels_contradicts_only_a_base_of_the_same_task(tmp_path: Path) -> None:
    base, adapter = make_headless("bert-other-labels", tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert misfit(adapter, config, base) == ""
    assert "classifier" in misfit(adapter, config | {"task_type": "TOKEN_CLS"}, base)
