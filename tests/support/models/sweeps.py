"""Folders with several runs on one base, written without torch: their weights are random and of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, WIDE, VOCABULARY, LAYERS = 16, 24, 40, 2
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Save a whole model."""
    numbers = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": _random(numbers, VOCABULARY, HIDDEN),
        "model.norm.weight": _random(numbers, HIDDEN),
    }
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = _random(numbers, WIDE, HIDDEN)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = _random(numbers, HIDDEN, WIDE)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_adapter(folder: Path, base: Path, *, seed: int = 1) -> Path:
    """Save a LoRA on one projection of each layer."""
    numbers, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        start = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        tensors[f"{start}.lora_A.weight"] = _random(numbers, 4, HIDDEN)
        tensors[f"{start}.lora_B.weight"] = _random(numbers, WIDE, 4)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def make_sweep(root: Path, *names: str) -> Path:
    """Save a base in ``root/base`` and a run on it for each name in ``root/sweep``, which is returned."""
    base = make_model(root / "base")
    for seed, name in enumerate(names, start=1):
        make_adapter(root / "sweep" / name / "checkpoint-10", base, seed=seed)
    return root / "sweep"


def _random(numbers: np.random.Generator, *shape: int) -> np.ndarray:
    return numbers.standard_normal(shape, dtype=np.float32)
