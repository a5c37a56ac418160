"""List the models that can be written, as TensorRT-LLM's graphs compute them.

The facts are those of TensorRT-LLM 1.2, the last release known to have these graphs: ``tensorrt_llm/models/{llama,qwen,gemma,phi3,gpt}``
(``config.py``, ``convert.py``, ``model.py``), ``tensorrt_llm/layers/{attention,mlp}.py``. A graph assumes some settings for which the
checkpoint has no field. A model must have these values, because TensorRT-LLM would compute another value wrong without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder_class import DecoderClass

Graph = Literal["llama", "qwen", "gemma", "phi3", "gpt"]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a model's tensors in transformers, without ``.weight`` and ``.bias``.

    Attributes:
        prefix: Beginning of all names but the head's.
        layers: Beginning of the names in a layer, before its number.
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
        class_name: The class, one of :data:`~slipway.model.decoders.classes.CLASSES`; TensorRT-LLM chooses the graph by it.
        graph: The graph.
        names: Names of its tensors.
        assumes: Values that the graph assumes for settings; a setting may also be missing or null.
        rope: Kinds of rope scaling that the graph computes.
        qk_norms: Whether queries and keys have norms.
        splits_embedding: Whether the embedding is divided among the GPUs of a layer.
        pipelines: Whether the graph can be divided into groups of layers.
    """

    class_name: str
    graph: Graph
    names: Names = Names()
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: tuple[str, ...] = ("linear", "yarn", "llama3")
    qk_norms: bool = False
    splits_embedding: bool = False
    pipelines: bool = True

    @property
    def kind(self) -> DecoderClass:
        """Facts about the class."""
        return CLASSES[self.class_name]


_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
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
    Architecture("LlamaForCausalLM", "llama", assumes=_SILU),
    Architecture("MistralForCausalLM", "llama", assumes=_SILU),
    Architecture("Qwen2ForCausalLM", "qwen", assumes=_SILU),
    Architecture("Qwen3ForCausalLM", "qwen", assumes={**_SILU, "attention_bias": (False,)}, qk_norms=True),
    Architecture(
        "GemmaForCausalLM",
        "gemma",
        assumes={**_GEMMA_GRAPH, "hidden_act": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True,)},
        rope=("linear",),
        splits_embedding=True,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "gemma",
        names=_GEMMA_NORMS,
        assumes={**_GEMMA_GRAPH, "tie_word_embeddings": (True,)},
        rope=("linear",),
        splits_embedding=True,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma",
        names=_GEMMA_NORMS,
        # The graph would apply a scaling to layers with a window too, and it has no cap for attention.
        assumes={
            **_GEMMA_GRAPH,
            "tie_word_embeddings": (True,),
            "attn_logit_softcapping": (),
            "sliding_window_pattern": (6,),
            "_sliding_window_pattern": (6,),
        },
        rope=(),
        qk_norms=True,
        splits_embedding=True,
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names=Names(attention=("self_attn.qkv_proj",), inner=("mlp.gate_up_proj",)),
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
        assumes={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        rope=(),
    ),
)
"""In the order in which they are named to users."""

KNOWN = ", ".join(each.class_name for each in ARCHITECTURES)


def architecture_of(class_name: str) -> Architecture | None:
    """Return the architecture of a class of transformers; None if no checkpoint can be written for it."""
    return next((each for each in ARCHITECTURES if each.class_name == class_name), None)
