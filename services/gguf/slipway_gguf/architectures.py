"""List the architectures that can be written, as llama.cpp computes them. This module is light: a client uses it before anything runs.

The facts are those of llama.cpp's converter (``conversion/``) and graphs (``src/models/``). A graph assumes some settings for which the
file has no key. A model must have these values, because llama.cpp would compute another value wrong without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.decoders.classes import CLASSES, DecoderClass
from slipway.model.decoders.decoder import FULL, LOCAL, settings_of
from slipway.texts import quoted

_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_QWEN_MOE: Mapping[str, tuple[Any, ...]] = {**_SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_GEMMA: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
}
_GREATER = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the largest model, in which llama.cpp scales attention by a head's share of the hidden size."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of llama.cpp, for a class of transformers.

    Attributes:
        name: Its name in a GGUF file, and the beginning of the keys of its numbers.
        class_name: The class of transformers, one of :data:`~slipway.model.decoders.classes.CLASSES`.
        assumes: Values that the graph assumes for settings; a setting may also be missing or null.
        rope: Kinds of rope scaling that the graph computes.
        paired: Whether the rotary embedding turns neighbouring values, so that rows of queries and keys change their order.
        transposed: Ends of the names of weights that are stored as (in, out).
        has_windows: Whether the graph computes layers with a sliding window.
    """

    name: str
    class_name: str
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: tuple[str, ...] = ("linear", "yarn")
    paired: bool = False
    transposed: tuple[str, ...] = ()
    has_windows: bool = False

    @property
    def kind(self) -> DecoderClass:
        """The class of transformers."""
        return CLASSES[self.class_name]


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "LlamaForCausalLM", assumes=_SILU, rope=("linear", "yarn", "llama3"), paired=True),
    Architecture("llama", "MistralForCausalLM", assumes=_SILU, rope=("linear", "yarn", "llama3"), paired=True),
    Architecture("qwen2", "Qwen2ForCausalLM", assumes=_SILU),
    Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        assumes={**_QWEN_MOE, "norm_topk_prob": (False,), "tie_word_embeddings": (False,), "qkv_bias": (True,)},
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", assumes={**_SILU, "attention_bias": (False,)}),
    Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        assumes={**_QWEN_MOE, "norm_topk_prob": (True,), "attention_bias": (False,)},
    ),
    Architecture("gemma2", "Gemma2ForCausalLM", assumes=_GEMMA, rope=("linear",), has_windows=True),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        assumes={**_GEMMA, "attn_logit_softcapping": (), "final_logit_softcapping": ()},
        rope=("linear",),
        has_windows=True,
    ),
    Architecture("phi3", "Phi3ForCausalLM", assumes=_SILU, rope=("longrope",)),
    Architecture("smollm3", "SmolLM3ForCausalLM", assumes={**_SILU, "no_rope_layer_interval": (4,)}, paired=True),
    Architecture("granite", "GraniteForCausalLM", assumes=_SILU, paired=True),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
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

KNOWN = ", ".join(each.class_name for each in ARCHITECTURES)


def architecture_of(config: ModelConfig) -> Architecture | None:
    """Return the architecture for a model's ``config.json``; None if no GGUF file can be written for it."""
    return next((each for each in ARCHITECTURES if each.class_name == config.class_name), None)


def refusal_reason(config: ModelConfig) -> str:
    """Return why no GGUF file can be written for a model's ``config.json``; an empty text if one can."""
    architecture = architecture_of(config)
    if architecture is None:
        return f"the model is {config.description}, and GGUF files are written of {KNOWN}"
    settings = settings_of(config)
    for key, values in architecture.assumes.items():
        value = settings.get(key)
        if value is not None and value not in values:
            return _describe_assumption(architecture, key, value, " or ".join(map(quoted, values)) or "no such setting")
    if architecture.has_windows:
        return _window_refusal(architecture, settings)
    if architecture.name == "smollm3":
        return _no_rope_refusal(architecture, settings)
    return ""


def _describe_assumption(architecture: Architecture, key: str, value: object, expected: str) -> str:
    return f"{key} is {quoted(value)} in config.json, and llama.cpp computes {architecture.class_name} with {expected}"


def _window_refusal(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    period = architecture.kind.period
    kinds = settings.get("layer_types")
    if isinstance(kinds, list):
        expected = [LOCAL if (layer + 1) % period else FULL for layer in range(len(kinds))]
        if kinds != expected:
            return _describe_assumption(
                architecture, "layer_types", kinds, f"full attention in every layer number {period}"
            )
    for key in ("sliding_window", *(key for key in architecture.kind.defaults if key.endswith("_softcapping"))):
        if settings.get(key) is None:
            return _describe_assumption(architecture, key, None, "a number")
    pattern = settings.get("sliding_window_pattern", period)
    if pattern != period:
        return _describe_assumption(architecture, "sliding_window_pattern", pattern, str(period))
    width = settings.get("head_dim")
    if settings.get("num_hidden_layers") == _GREATER[architecture.name]:
        for key in ("hidden_size", "num_attention_heads"):
            if not isinstance(settings.get(key), int) or not settings[key]:
                return _describe_assumption(architecture, key, settings.get(key), "a whole number from 1")
        width = settings["hidden_size"] // settings["num_attention_heads"]
    scalar = settings.get("query_pre_attn_scalar")
    return "" if scalar == width else _describe_assumption(architecture, "query_pre_attn_scalar", scalar, str(width))


def _no_rope_refusal(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    rotated = settings.get("no_rope_layers")
    expected = [int((layer + 1) % 4 != 0) for layer in range(len(rotated))] if isinstance(rotated, list) else None
    return (
        ""
        if rotated == expected
        else _describe_assumption(architecture, "no_rope_layers", rotated, "no rotation in every fourth layer")
    )
