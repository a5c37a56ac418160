"""Tiny bases and adapters as transformers and peft save them, made from seeds; scaling is never 1 and B never 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE

torch.set_num_threads(1)
VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False),
    "qwen3-tied": lambda: tf.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "gpt2": lambda: tf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=32),
}
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def randomise(model: Any, seed: int = 11) -> None:
    """Give every trainable weight, including B, values as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.copy_(parameter + 0.1 * noise if "lora_" not in name else 0.1 * noise)


@dataclass
class Case:
    """A base folder, an adapter folder, and a folder for the merge's output."""

    base: Path
    adapter: Path
    workdir: Path

    def reference(self, dtype: torch.dtype | None = None) -> Any:
        """Load the unmerged model: base and adapter by peft."""
        base = tf.AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype or "auto")
        return PeftModel.from_pretrained(base, self.adapter).eval()

    def merge(self, **params: Any) -> tuple[Path, Context]:
        ctx = Context(workdir=self.workdir)
        out = STAGE.run({"base": self.base, "adapter": self.adapter}, MergeParams(**params), ctx)
        return out["pytorch"], ctx


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def load(folder: Path, **options: Any) -> Any:
    model, info = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def make_case(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32, *, shard: str = "5GB", resize: int = 0, **lora: Any
) -> Case:
    """Make a base of one of :data:`CONFIGS` and an adapter for it."""
    lora.setdefault("target_modules", ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else "all-linear")
    return save_case(folder, make_model(kind, dtype), shard=shard, resize=resize, task_type="CAUSAL_LM", **lora)


def save_case(folder: Path, model: Any, *, shard: str = "5GB", resize: int = 0, **lora: Any) -> Case:
    """Save a base and an adapter as a training run does."""
    base, adapter, workdir = (folder / name for name in ("base", "adapter", "work"))
    model.save_pretrained(base, max_shard_size=shard)
    if resize:
        model.resize_token_embeddings(resize)
    model.name_or_path = str(base)
    tuned = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 10, **lora}))
    randomise(tuned)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(adapter)
    workdir.mkdir()
    return Case(base, adapter, workdir)
