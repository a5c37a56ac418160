"""The models that are written, as TensorRT-LLM's graphs compute them. Data.

The facts are those of TensorRT-LLM 1.2, the last release whose sources were found with these graphs: ``tensorrt_llm/models/{llama,qwen,gemma,phi3,gpt}`` (``config.py``,
``convert.py``, ``model.py``), ``tensorrt_llm/layers/{attention,mlp}.py``. What a graph assumes without a field in the checkpoint is a setting that
a model must have: another value would be computed wrong without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["llama", "qwen", "gemma", "phi3", "gpt"]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a model's tensors in transformers, without ``.weight`` and ``.bias``.

    Attributes:
        prefix: Beginning of all but the head's.
        layers: Beginning of a layer's, before its number.
        embedding: The embedding of tokens.
        positions: The embedding of positions; empty for none.
        final: The norm behind all layers.
        attention: Queries, keys and values: three matrices, or one with all of them.
        dense: The matrix behind attention.
        inner: The matrices before the activation: gate and up, one with both, or one without a gate.
        down: The matrix behind it.
        norms: Norms by TensorRT-LLM's name within a layer.
    """

    prefix: str = "model."
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    final: str = "norm"
    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    dense: str = "self_attn.o_proj"
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: Mapping[str, str] = field(
        default_factory=lambda: {
            "input_layernorm": "input_layernorm",
            "post_layernorm": "post_attention_layernorm",
        }
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """One class of transformers, and the graph that computes it.

    Attributes:
        model_class: The class, by which TensorRT-LLM chooses the graph too.
        kind: The graph.
        names: Names of its tensors.
        defaults: Values that the class has for settings that ``config.json`` may leave out.
        assumes: Values that the graph assumes of settings, unless they are left out or null.
        rope: Kinds of rope scaling that the graph computes.
        norm_offset: Number that the class adds to the weights of its norms; in a checkpoint it is part of them.
        qk_norms: Whether queries and keys have norms.
        head_width: Width of a head that is left out; 0 for an equal share of the hidden size.
        period: Period of the layers with full attention among those with a sliding window; 0: ``sliding_window`` counts for all layers.
        splits_embedding: Whether the embedding is divided among the GPUs of a layer.
        pipelines: Whether the graph can be divided into groups of layers.
        transposed: Whether matrices are stored as (in, out).
    """

    model_class: str
    kind: Kind
    names: Names = Names()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: tuple[str, ...] = ("linear", "yarn", "llama3")
    norm_offset: float = 0.0
    qk_norms: bool = False
    head_width: int = 0
    period: int = 0
    splits_embedding: bool = False
    pipelines: bool = True
    transposed: bool = False

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the class's own defaults."""
        return {**self.defaults, **config}


_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_LLAMA: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_GEMMA: Mapping[str, Any] = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA_GRAPH: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
}
_GEMMA_NORMS = Names(
    norms={
        "input_layernorm": "input_layernorm",
        "post_layernorm": "post_attention_layernorm",
        "pre_feedforward_layernorm": "pre_feedforward_layernorm",
        "post_feedforward_layernorm": "post_feedforward_layernorm",
    }
)

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("LlamaForCausalLM", "llama", defaults=_LLAMA, assumes=_SILU),
    Architecture(
        "MistralForCausalLM",
        "llama",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        assumes=_SILU,
    ),
    Architecture("Qwen2ForCausalLM", "qwen", defaults=_QWEN, assumes=_SILU),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen",
        defaults=_QWEN,
        assumes={**_SILU, "attention_bias": (False,)},
        qk_norms=True,
        head_width=128,
    ),
    Architecture(
        "GemmaForCausalLM",
        "gemma",
        defaults={**_GEMMA, "num_key_value_heads": 16},
        assumes={**_GEMMA_GRAPH, "hidden_act": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True,)},
        rope=("linear",),
        norm_offset=1.0,
        head_width=256,
        splits_embedding=True,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "gemma",
        names=_GEMMA_NORMS,
        defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        assumes={**_GEMMA_GRAPH, "tie_word_embeddings": (True,)},
        rope=("linear",),
        norm_offset=1.0,
        head_width=256,
        period=2,
        splits_embedding=True,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma",
        names=_GEMMA_NORMS,
        defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
        # The graph would apply a scaling to layers with a window too, and it has no cap for attention.
        assumes={
            **_GEMMA_GRAPH,
            "tie_word_embeddings": (True,),
            "attn_logit_softcapping": (),
            "sliding_window_pattern": (6,),
            "_sliding_window_pattern": (6,),
        },
        rope=(),
        norm_offset=1.0,
        qk_norms=True,
        head_width=256,
        period=6,
        splits_embedding=True,
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names=Names(attention=("self_attn.qkv_proj",), inner=("mlp.gate_up_proj",)),
        defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        assumes={**_SILU, "attention_bias": (False,)},
        rope=("longrope",),
        pipelines=False,
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt",
        names=Names(
            prefix="transformer.",
            layers="h",
            embedding="wte",
            positions="wpe",
            final="ln_f",
            attention=("attn.c_attn",),
            dense="attn.c_proj",
            inner=("mlp.c_fc",),
            down="mlp.c_proj",
            norms={"input_layernorm": "ln_1", "post_layernorm": "ln_2"},
        ),
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        assumes={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        rope=(),
        transposed=True,
    ),
)
"""In the order in which they are named to users."""

KNOWN = ", ".join(each.model_class for each in ARCHITECTURES)


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of the model with this ``config.json``; None if it is not written."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    return next((each for each in ARCHITECTURES if each.model_class == name), None)
