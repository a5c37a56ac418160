"""A tiny model that was trained with its multi-token head accepts its drafts, and does so less often after a fine-tune on other text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import modeling_layers
from transformers.cache_utils import MtpCache

from slipway.proof.runtime import HEAD_FILE, Samples
from slipway.validation.parts import MultiTokenHead
from slipway_validate.protocol.messages import RunSpec
from slipway_validate.runner.multi_token import measure_head
from slipway_validate.runner.runtime_reference import load
from support.models.current_recipes import KINDS, VOCABULARY
from support.models.multi_token import BEHIND_THE_LAST, Tensors, edit_tensors

WORDS, FIRST = 40, 50
"""Tokens of the text, and the first of them."""
LEARNED, OTHER = (3, 7), (7, 11)
"""Two texts: each next word follows from the last one by a factor and a summand."""


def write_text(rule: tuple[int, int], generator: torch.Generator, *, rows: int, length: int) -> torch.Tensor:
    """Return a text in which one word of ten is random: (rows, length) of token ids."""
    words = [torch.randint(0, WORDS, (rows,), generator=generator)]
    for _ in range(length - 1):
        by_rule = (words[-1] * rule[0] + rule[1]) % WORDS
        jumps = torch.rand(rows, generator=generator) < 0.1
        words.append(torch.where(jumps, torch.randint(0, WORDS, (rows,), generator=generator), by_rule))
    return torch.stack(words, dim=1) + FIRST


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def train(parameters: Any, loss: Any, rule: tuple[int, int], *, steps: int, rate: float) -> None:
    optimizer, generator = torch.optim.AdamW(parameters, lr=rate), torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(write_text(rule, generator, rows=16, length=24)).backward()
        optimizer.step()


def train_with_head(folder: Path) -> Any:
    """Train a tiny GLM-4 and its head together, as DeepSeek-V3 was; save both, and return the model."""
    torch.manual_seed(0)
    model = KINDS["glm4-moe"].build()
    config = copy.deepcopy(model.config)
    config.num_mtp_layers = 1
    model.config = config
    head = modeling_layers.MtpModel(model, 1)
    # Its class leaves routers and experts as the memory was.
    head.layers[0].mtp_block.load_state_dict(model.model.layers[-1].state_dict())

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        results = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        places = torch.arange(1, tokens.shape[1] - 1)[None].expand(len(tokens), -1)
        states, cache = results.hidden_states[-1][:, :-2], MtpCache(config=head.config)
        drafts = model.lm_head(head.forward_layer(0, states, places, cache, input_ids=tokens[:, 1:-1]))
        return loss_of(results.logits[:, :-1], tokens[:, 1:]) + loss_of(drafts, tokens[:, 2:])

    train({*model.parameters(), *head.parameters()}, loss, LEARNED, steps=100, rate=3e-3)
    model.save_pretrained(folder)

    def add(tensors: Tensors) -> None:
        for name, value in head.layers[0].state_dict().items():
            place = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors[BEHIND_THE_LAST + place] = value
        tensors[f"{BEHIND_THE_LAST}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors[f"{BEHIND_THE_LAST}shared_head.head.weight"] = model.lm_head.weight.detach().clone()

    edit_tensors(folder, add)
    return model


def fine_tune(model: Any, rule: tuple[int, int], folder: Path) -> None:
    """Train a LoRA on the model alone, which leaves the head as it is; save it, and take it off again."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(tuned(input_ids=tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])

    train([each for each in tuned.parameters() if each.requires_grad], loss, rule, steps=100, rate=1e-2)
    tuned.save_pretrained(folder)
    tuned.unload()


def measure(base: Path, adapter: Path | None, rule: tuple[int, int], work: Path) -> MultiTokenHead:
    """Measure the head on a text as the reference does."""
    work.mkdir()
    tokens = write_text(rule, torch.Generator().manual_seed(2), rows=6, length=48).numpy().astype(np.int64)
    Samples(tokens).write(work / "samples")
    model = load(base, adapter, threads=1)
    model.prepare_comparison()
    spec = RunSpec(runtime="", model=base, adapter=adapter, samples=work / "samples", drafting=True)
    measure_head(model, spec, work, report=lambda *_: None)
    model.leave_comparison()
    return MultiTokenHead.model_validate_json((work / HEAD_FILE).read_bytes())


@pytest.mark.slow
def test_a_trained_head_is_accepted_and_less_often_after_a_fine_tune_on_other_text(tmp_path: Path) -> None:
    base, other, same = (tmp_path / name for name in ("base", "other", "same"))
    model = train_with_head(base)
    fine_tune(model, OTHER, other)
    fine_tune(model, LEARNED, same)
    plain = measure(base, None, LEARNED, tmp_path / "plain")
    assert plain.not_run == ""
    assert plain.accepted_before is None
    assert plain.accepted_after is not None
    assert plain.accepted_after > 0.9  # one word of 40 by chance
    moved = measure(base, other, OTHER, tmp_path / "moved")
    assert moved.accepted_before is not None
    assert moved.accepted_after is not None
    assert moved.accepted_after < 0.3 < 0.8 < moved.accepted_before
    assert "moved away from its multi-token head" in moved.warning
    kept = measure(base, same, LEARNED, tmp_path / "kept")
    assert kept.accepted_after is not None
    assert kept.accepted_after > 0.9
    assert kept.warning == ""
