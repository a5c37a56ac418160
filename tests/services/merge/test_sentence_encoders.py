"""An adapter of a sentence encoder on a base with a language head: the merge is the model without that head, as peft merges it."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers as tf

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.safetensors_file import read_weights
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from support.models.family_models import inputs_of, make_family_model
from support.models.sentence_models import write_modules

_TARGETS = {"bert-masked": ("query", "value"), "qwen3": ("q_proj", "down_proj")}


def trained_by_sentence_transformers(base: Path, folder: Path, targets: tuple[str, ...], task: str | None) -> Path:
    """Save a LoRA on the base model of whatever class the folder holds, and the list of modules beside it."""
    torch.manual_seed(11)
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=list(targets), task_type=task, init_lora_weights=False)
    peft.get_peft_model(tf.AutoModel.from_pretrained(base, dtype=torch.float32), config).save_pretrained(folder)
    return write_modules(folder, normalized=True)


def vectors(model: tf.PreTrainedModel, kind: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs_of(kind)).last_hidden_state


@pytest.mark.parametrize(
    ("kind", "named", "task"), [("bert-masked", "BertModel", "FEATURE_EXTRACTION"), ("qwen3", "Qwen3Model", None)]
)
def test_the_language_head_is_left_out(tmp_path: Path, kind: str, named: str, task: str | None) -> None:
    base = make_family_model(kind, tmp_path / "base")
    adapter = trained_by_sentence_transformers(base, tmp_path / "adapter", _TARGETS[kind], task)
    ctx = Context(workdir=tmp_path / "work")
    ctx.workdir.mkdir()
    output = STAGE.run({"base": base, "adapter": adapter}, MergeParams(verify="full"), ctx)["pytorch"]
    assert ModelConfig.read(output)["architectures"] == [named]
    assert ModelConfig.read(output).family is FEATURE_EXTRACTION
    assert (output / "1_Pooling" / "config.json").is_file()
    heads = ("cls.predictions", "lm_head", "pooler")
    assert not [name for name in read_weights(output) if name.startswith(heads)]
    unmerged = tf.AutoModel.from_pretrained(base, dtype=torch.float32)
    wanted = vectors(peft.PeftModel.from_pretrained(unmerged, adapter).merge_and_unload(), kind)
    found = vectors(tf.AutoModel.from_pretrained(output), kind)
    assert (found - wanted).abs().max() < 1e-5
    assert (vectors(tf.AutoModel.from_pretrained(base), kind) - wanted).abs().max() > 1e-2


def test_a_language_model_keeps_its_head_beside_a_list_of_modules(tmp_path: Path) -> None:
    """An adapter that says what it is for decides, and the list would say otherwise of the result."""
    from support.models.family_models import make_family_adapter

    base = make_family_model("qwen3", tmp_path / "base")
    adapter = write_modules(make_family_adapter("qwen3", base, tmp_path / "adapter"))
    ctx = Context(workdir=tmp_path / "work")
    ctx.workdir.mkdir()
    output = STAGE.run({"base": base, "adapter": adapter}, MergeParams(verify="spot"), ctx)["pytorch"]
    assert ModelConfig.read(output)["architectures"] == ["Qwen3ForCausalLM"]
    assert not (output / "modules.json").exists()
