"""Tiny models of each family for the ONNX export's tests, and the results of a run of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.tiny_models import save_tokenizer

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def _model(family: str) -> Any:
    import transformers as tf

    match family:
        case "qwen3-tied":
            return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True))
        case "qwen3":
            return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False))
        case "qwen2":
            return tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES))
        case "llama":
            return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))
        case "mistral":
            return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=None))
        case "mistral-window":
            return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=16))
        case "gemma3-window":
            kinds = ["sliding_attention", "full_attention"]
            window = {"sliding_window": 16, "layer_types": kinds, "query_pre_attn_scalar": 32}
            return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZES, head_dim=32, **window))
        case "gpt2":
            sizes = {"vocab_size": 128, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
            return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=2))
        case "t5":
            sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
            return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))
        case _:
            raise ValueError(family)


def save_model(family: str, folder: Path, *, dtype: str = "float32", **saving: Any) -> Path:
    """Make a model in which every weight matters: matrices large enough to tell positions apart, vectors far from 0 and 1."""
    import torch

    torch.manual_seed(0)
    model = _model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **saving)
    save_tokenizer(folder)
    return folder


class Exported:
    """The results of one run of the stage."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder = folder
        self.facts = facts

    @property
    def onnx(self) -> Any:
        """Load the graph without external data."""
        import onnx

        return onnx.load(self.folder / "model.onnx", load_external_data=False)

    @property
    def opset(self) -> int:
        """Return the opset of the written file."""
        return next(entry.version for entry in self.onnx.opset_import if not entry.domain)
