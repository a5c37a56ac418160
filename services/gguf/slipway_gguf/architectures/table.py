"""The architectures that are written, as llama.cpp computes them. Data, and light: a client asks it before anything runs.

Facts are those of llama.cpp's converter (``conversion/``) and graphs (``src/models/``). What a graph assumes without a key in the file
is a setting that a model must have: another value would be computed wrong without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.texts import quoted


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of llama.cpp.

    Attributes:
        name: Its name in a GGUF file, and the beginning of the keys of its numbers.
        classes: Classes of transformers that it computes.
        defaults: Values that the class of transformers has for settings that ``config.json`` may leave out.
        assumes: Values that the graph assumes of settings, unless they are left out or null.
        rope: Kinds of rope scaling that the graph computes.
        paired: Whether the rotary embedding turns neighbouring values, so that rows of queries and keys change their order.
        norm_offset: Number that the class adds to the weights of its norms.
        transposed: Ends of the names of weights that are stored as (in, out).
        windows: Period of the layers with full attention among those with a sliding window; 0 where windows are not computed.
        head_dim: Width of a head that is left out; 0 for an equal share of the hidden size.
    """

    name: str
    classes: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: tuple[str, ...] = ("linear", "yarn")
    paired: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()
    windows: int = 0
    head_dim: int = 0

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the class's own defaults."""
        return {**self.defaults, **config}


_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN_MOE: Mapping[str, tuple[Any, ...]] = {**_SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_GEMMA: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA_GRAPH: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
}
_LLAMA: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        ("LlamaForCausalLM",),
        defaults=_LLAMA,
        assumes=_SILU,
        rope=("linear", "yarn", "llama3"),
        paired=True,
    ),
    Architecture(
        "llama",
        ("MistralForCausalLM",),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        assumes=_SILU,
        rope=("linear", "yarn", "llama3"),
        paired=True,
    ),
    Architecture("qwen2", ("Qwen2ForCausalLM",), defaults=_QWEN, assumes=_SILU),
    Architecture(
        "qwen2moe",
        ("Qwen2MoeForCausalLM",),
        defaults={**_QWEN, "num_experts": 60, "num_experts_per_tok": 4},
        assumes={**_QWEN_MOE, "norm_topk_prob": (False,), "tie_word_embeddings": (False,), "qkv_bias": (True,)},
    ),
    Architecture(
        "qwen3", ("Qwen3ForCausalLM",), defaults=_QWEN, assumes={**_SILU, "attention_bias": (False,)}, head_dim=128
    ),
    Architecture(
        "qwen3moe",
        ("Qwen3MoeForCausalLM",),
        defaults={
            **_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        assumes={**_QWEN_MOE, "norm_topk_prob": (True,), "attention_bias": (False,)},
    ),
    Architecture(
        "gemma2",
        ("Gemma2ForCausalLM",),
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        assumes=_GEMMA_GRAPH,
        rope=("linear",),
        norm_offset=1.0,
        windows=2,
        head_dim=256,
    ),
    Architecture(
        "gemma3",
        ("Gemma3ForCausalLM",),
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        assumes={**_GEMMA_GRAPH, "attn_logit_softcapping": (), "final_logit_softcapping": ()},
        rope=("linear",),
        norm_offset=1.0,
        windows=6,
        head_dim=256,
    ),
    Architecture(
        "phi3",
        ("Phi3ForCausalLM",),
        defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        assumes=_SILU,
        rope=("longrope",),
    ),
    Architecture(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        assumes={**_SILU, "no_rope_layer_interval": (4,)},
        paired=True,
    ),
    Architecture(
        "granite",
        ("GraniteForCausalLM",),
        defaults={
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        assumes=_SILU,
        rope=("linear", "yarn"),
        paired=True,
    ),
    Architecture(
        "gpt2",
        ("GPT2LMHeadModel",),
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        assumes={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        rope=(),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ),
)
"""In the order in which they are named to users."""

KNOWN = ", ".join(name for each in ARCHITECTURES for name in each.classes)
_GREATER = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest model, for which llama.cpp scales attention by the share of a head in the hidden size."""


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of the model with this ``config.json``; None if it is not written."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    return next((each for each in ARCHITECTURES if name in each.classes), None)


def refusal_reason(config: ModelConfig) -> str:
    """Return why no GGUF file is written of the model with this ``config.json``; empty if one is."""
    found = architecture_of(config)
    if found is None:
        return f"the model is {config.description}, and GGUF files are written of {KNOWN}"
    settings = found.settings(config)
    for key, values in found.assumes.items():
        value = settings.get(key)
        if value is not None and value not in values:
            return _assumed(found, key, value, " or ".join(map(quoted, values)) or "no such setting")
    if found.windows:
        return _windows_refused(found, settings)
    if found.name == "smollm3":
        return _no_rope_refused(found, settings)
    return ""


def _assumed(found: Architecture, key: str, value: object, expected: str) -> str:
    return f"{key} is {quoted(value)} in config.json, and llama.cpp computes {found.classes[0]} with {expected}"


def _windows_refused(found: Architecture, settings: Mapping[str, Any]) -> str:
    kinds = settings.get("layer_types")
    if isinstance(kinds, list):
        expected = [
            "sliding_attention" if (layer + 1) % found.windows else "full_attention" for layer in range(len(kinds))
        ]
        if kinds != expected:
            return _assumed(found, "layer_types", kinds, f"full attention in every layer number {found.windows}")
    for key in ("sliding_window", *(key for key in found.defaults if key.endswith("_softcapping"))):
        if settings.get(key) is None:
            return _assumed(found, key, None, "a number")
    pattern = settings.get("sliding_window_pattern", found.windows)
    if pattern != found.windows:
        return _assumed(found, "sliding_window_pattern", pattern, str(found.windows))
    width = settings.get("head_dim") or found.head_dim
    if settings.get("num_hidden_layers") == _GREATER[found.name]:
        for key in ("hidden_size", "num_attention_heads"):
            if not isinstance(settings.get(key), int) or not settings[key]:
                return _assumed(found, key, settings.get(key), "a whole number from 1")
        width = settings["hidden_size"] // settings["num_attention_heads"]
    scalar = settings.get("query_pre_attn_scalar")
    return "" if scalar == width else _assumed(found, "query_pre_attn_scalar", scalar, str(width))


def _no_rope_refused(found: Architecture, settings: Mapping[str, Any]) -> str:
    rotated = settings.get("no_rope_layers")
    expected = [int((layer + 1) % 4 != 0) for layer in range(len(rotated))] if isinstance(rotated, list) else None
    return (
        "" if rotated == expected else _assumed(found, "no_rope_layers", rotated, "no rotation in every fourth layer")
    )
