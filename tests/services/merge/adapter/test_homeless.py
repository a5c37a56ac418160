"""Adapters whose names or heads the base does not have as they are: placed where it is certain, otherwise refused in words of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_validate.runner.runtime_reference import load

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LLAMA = SMALL | {"num_key_value_heads": 2}
PREFIX = "base_model.model."


def _adapter(folder: Path, model: Any, *, rename: Callable[[str], str] = str, edit: Any = None, **lora: Any) -> Path:
    """Train an adapter's factors, and save them under other names or with other settings."""
    settings = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**settings | lora))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(folder, save_embedding_layers=False)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({rename(name): value for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    found = json.loads(config.read_text()) | {"base_model_name_or_path": "base"} | (edit or {})
    config.write_text(json.dumps(found))
    return folder


def _merge(base: Path, adapter: Path, workdir: Path) -> Path:
    workdir.mkdir()
    ctx = Context(workdir=workdir)
    found = STAGE.run({"base": base, "adapter": adapter}, MergeParams(verify="spot"), ctx)["pytorch"]
    assert not ctx.facts.get("warnings")
    return found


def _refusal(base: Path, adapter: Path, workdir: Path) -> ModelMergeError:
    with pytest.raises(ModelMergeError) as caught:
        _merge(base, adapter, workdir)
    assert caught.value.reason == "ADAPTER_TENSOR_UNUSED"
    assert "another base model" not in f"{caught.value.message} {caught.value.remedy}"
    return caught.value


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(1, 13)[None]).logits
    return found


def _saved(model: Any, folder: Path, rename: Callable[[str], str] = str) -> Path:
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "stored",
    [
        str,
        lambda name: name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm"),
    ],
    ids=["as saved by 5", "with the part within"],
)
def test_a_text_models_adapter_on_its_vision_language_base(tmp_path: Path, stored: Callable[[str], str]) -> None:
    """Target names of the text model match layers of the vision model too, which was not trained."""
    torch.manual_seed(0)
    text = LLAMA | {"head_dim": 8, "sliding_window": 32, "bos_token_id": None, "eos_token_id": None}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
    }
    config = tf.Gemma3Config(
        text_config=text, vision_config=vision | {"patch_size": 4}, mm_tokens_per_image=4,
        boi_token_index=90, eoi_token_index=91, image_token_index=92,
    )  # fmt: skip
    whole, alone = tf.Gemma3ForConditionalGeneration(config), tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**text))
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    base = _saved(whole, tmp_path / "base", stored)
    adapter = _adapter(tmp_path / "adapter", alone)
    expected = _logits(peft.PeftModel.from_pretrained(alone.unload() if hasattr(alone, "unload") else alone, adapter))
    merged = tf.Gemma3ForConditionalGeneration.from_pretrained(_merge(base, adapter, tmp_path / "work"))
    torch.testing.assert_close(_logits(merged), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(_logits(load(base, adapter, threads=1).module), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["unembed_tokens", "model.unembed_tokens"])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_head_as_tinker_names_it(tmp_path: Path, name: str, prefix: str) -> None:
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    base, targets = _saved(model, tmp_path / "base"), ["q_proj", "embed_tokens", "lm_head"]
    adapter = _adapter(tmp_path / "adapter", model, target_modules=targets)
    expected = _logits(load(base, adapter, threads=1).module)
    weights = adapter / "adapter_model.safetensors"
    renamed = {key.replace("lm_head", name).replace(PREFIX, prefix): value for key, value in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": ["q_proj", "embed_tokens", "unembed_tokens"]})
    )
    merged = tf.AutoModelForCausalLM.from_pretrained(_merge(base, adapter, tmp_path / "work"))
    torch.testing.assert_close(_logits(merged), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(_logits(load(base, adapter, threads=1).module), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("says", ["auto_mapping", "config.json", "one row"])
def test_a_cross_encoder_without_a_task_type(tmp_path: Path, says: str) -> None:
    labels = 1 if says == "one row" else 3
    encoder = tf.RobertaConfig(**SMALL, num_labels=labels)
    base = _saved(tf.RobertaForMaskedLM(encoder), tmp_path / "base")
    model = tf.RobertaForSequenceClassification.from_pretrained(base, num_labels=labels)
    adapter = _adapter(
        tmp_path / "adapter", model, target_modules=["query"], modules_to_save=["classifier"], task_type=None,
        edit={} if says == "auto_mapping" else {"auto_mapping": None},
    )  # fmt: skip
    if says == "config.json":
        tf.RobertaConfig(
            **SMALL, num_labels=labels, architectures=["RobertaForSequenceClassification"]
        ).save_pretrained(adapter)
    merged = _merge(base, adapter, tmp_path / "work")
    found = json.loads((merged / "config.json").read_text())
    assert found["architectures"] == ["RobertaForSequenceClassification"]
    assert len(load_file(merged / "model.safetensors")["classifier.out_proj.weight"]) == labels


def test_a_head_of_a_task_that_nothing_names(tmp_path: Path) -> None:
    base = _saved(tf.RobertaForMaskedLM(tf.RobertaConfig(**SMALL)), tmp_path / "base")
    model = tf.RobertaForSequenceClassification.from_pretrained(base, num_labels=3)
    adapter = _adapter(
        tmp_path / "adapter", model, target_modules=["query"], modules_to_save=["classifier"], task_type=None,
        edit={"auto_mapping": None},
    )  # fmt: skip
    error = _refusal(base, adapter, tmp_path / "work")
    assert "names no task_type" in error.message
    assert "SEQ_CLS" in error.remedy


def _headed(tmp_path: Path, head: str) -> tuple[Path, Path]:
    base = _saved(tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)), tmp_path / "base")
    model = tf.LlamaForSequenceClassification.from_pretrained(base, num_labels=3)
    edit = {"task_type": "CAUSAL_LM", "modules_to_save": [head]}
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["score"], "task_type": "SEQ_CLS"}
    return base, _adapter(
        tmp_path / "adapter", model, rename=lambda name: name.replace("score", head), edit=edit, **lora
    )


@pytest.mark.parametrize(
    ("head", "words"), [("score", "its task_type is CAUSAL_LM, whose models have none"), ("v_head", "value head")]
)
def test_a_new_head_of_a_causal_task(tmp_path: Path, head: str, words: str) -> None:
    base, adapter = _headed(tmp_path, head)
    error = _refusal(base, adapter, tmp_path / "work")
    assert words in error.message
    assert "SEQ_CLS" in error.remedy


def test_two_adapters_around_each_other(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    base = _saved(model, tmp_path / "base")
    adapter = _adapter(tmp_path / "adapter", model, rename=lambda name: name.replace(".lora_", ".base_layer.lora_"))
    error = _refusal(base, adapter, tmp_path / "work")
    assert "two adapters" in error.message
    assert "merge_and_unload" in error.remedy


def test_a_base_that_was_saved_with_an_adapter_around_it(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    base = _saved(model, tmp_path / "base", lambda name: name.replace("q_proj.", "q_proj.base_layer."))
    error = _refusal(base, _adapter(tmp_path / "adapter", model), tmp_path / "work")
    assert "saved while an adapter was around" in error.message
    assert "unload" in error.remedy


def test_experts_of_gpt_oss_as_unsloth_trains_them(tmp_path: Path) -> None:
    config = tf.GptOssConfig(**LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=16)
    base, adapter = _saved(tf.GptOssForCausalLM(config), tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    sizes = {"gate_up_projs": (32, 96), "down_projs": (48, 32)}
    names = {
        f"{PREFIX}model.layers.0.mlp.experts.{kind}.{expert}": size
        for kind, size in sizes.items()
        for expert in range(2)
    }
    tensors = {f"{name}.lora_A.weight": torch.randn(4, inner) for name, (inner, _) in names.items()}
    tensors |= {f"{name}.lora_B.weight": torch.randn(outer, 4) for name, (_, outer) in names.items()}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["down_projs.0"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "base"}))
    error = _refusal(base, adapter, tmp_path / "work")
    assert "Unsloth" in error.message
    assert "save_pretrained_merged" in error.remedy
