"""Tiny models of each architecture that is written as GGUF, and llama.cpp's logits for tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from slipway.stage import Context
from slipway_gguf.params import GGUFParams
from slipway_gguf.stage import STAGE

VOCABULARY = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": None,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _longrope(width: int, original: int) -> dict[str, Any]:
    short = [1.0 + 0.05 * index for index in range(width // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "short_factor": short,
        "long_factor": [2 * factor for factor in short],
    }


def _of(config: str, model: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, model)(getattr(tf, config)(**{**_SIZES, **more}))


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _gemma(layers: int, period: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    }


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": _of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True),
    "qwen3-yarn": _of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=False, rope_parameters=_YARN),
    "qwen2": _of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=False),
    "qwen2moe": _of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3moe": _of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "llama": _of("LlamaConfig", "LlamaForCausalLM"),
    "llama-bias": _of("LlamaConfig", "LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "llama3": _of("LlamaConfig", "LlamaForCausalLM", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-linear": _of("LlamaConfig", "LlamaForCausalLM", rope_parameters=_LINEAR),
    "mistral": _of("MistralConfig", "MistralForCausalLM", head_dim=32, sliding_window=None),
    "gemma2": _of("Gemma2Config", "Gemma2ForCausalLM", **_gemma(4, 2)),
    "gemma3": _of("Gemma3TextConfig", "Gemma3ForCausalLM", **_gemma(7, 6)),
    "phi3": _of("Phi3Config", "Phi3ForCausalLM"),
    "phi3-long": _of(
        "Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=16, rope_parameters=_longrope(16, 16)
    ),
    # llama.cpp chooses by the length of its context, which is 256 at least.
    "phi3-short": _of(
        "Phi3Config",
        "Phi3ForCausalLM",
        max_position_embeddings=512,
        original_max_position_embeddings=256,
        rope_parameters=_longrope(16, 256),
    ),
    "smollm3": _of("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=True),
    "granite": _of(
        "GraniteConfig",
        "GraniteForCausalLM",
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=3.0,
    ),
    "gpt2": _gpt2,
}


def save_family(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model in which every weight matters, and return it: norms and biases differ from 1 and 0, and positions can be told apart."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder)
    return model


def write_gguf(model: Path, workdir: Path, *, level: str = "f16", **context: Any) -> tuple[Path, Context]:
    """Run the stage; return the file, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, **context)
    folder = STAGE.run({"pytorch": model}, GGUFParams(type=level, name="tiny"), ctx)["gguf"]
    [file] = folder.glob("*.gguf")
    return file, ctx


def llama_distributions(file: Path, tokens: Sequence[int], *, context: int = 128) -> np.ndarray:
    """Return llama.cpp's log probabilities of the next token behind each token. (tokens, vocabulary)."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    server = xllamacpp.Server(params)
    found = np.full((len(tokens), VOCABULARY), -np.inf)
    for end in range(1, len(tokens) + 1):
        prompt = [int(token) for token in tokens[:end]]
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "logprobs": VOCABULARY, "temperature": -1}
        )
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            found[end - 1, entry["id"]] = entry["logprob"]
    return found


def torch_distributions(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return transformers' log probabilities of the next token behind each token. (tokens, vocabulary)."""
    with torch.no_grad():
        logits = model.float()(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()
