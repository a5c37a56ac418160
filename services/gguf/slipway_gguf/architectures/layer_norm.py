"""Architectures with attention in all layers, no experts, and layer norms, which subtract the mean. Data, and light.

Sources: llama.cpp's ``conversion/`` (``command_r.py``, ``olmo.py``, ``phi.py``, ``gpt2.py``, ``nemotron.py``, ``falcon.py``, ``jais.py``) and
``src/models/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway_gguf.architectures.entry import CONFIG_VALUES, Architecture, Key, Numbers, Piece, Target, local_layers
from slipway_gguf.architectures.refusals import (
    first_of,
    other_attention,
    other_head_norms,
    other_width,
    unlisted_windows,
)
from slipway_gguf.architectures.settings import GELU, SILU, SILU_WITHOUT_BIAS, TIED, UNTIED
from slipway_gguf.architectures.views import in_groups


def _heads_apart(numbers: Numbers) -> tuple[Piece, ...]:
    """Return queries, keys and values of all heads behind each other; the model has so those of the heads that share keys."""
    groups, width = numbers.decoder.kv_heads, numbers.decoder.width
    queries = numbers.decoder.heads // groups * width
    ends = (0, queries, queries + width, queries + 2 * width)
    return tuple(Piece(rows=in_groups(groups, first, end)) for first, end in pairwise(ends))


def _all_heads(_: Mapping[str, Any]) -> None:
    """Return nothing: each head has keys and values of its own, whatever settings say."""


def _falcon_heads(settings: Mapping[str, Any]) -> Any:
    """Return the heads of keys of a Falcon: older ones have one or as many as queries, whatever the number says."""
    if settings.get("multi_query") and not settings.get("new_decoder_architecture"):
        return 1
    return settings.get("num_kv_heads")


def _without_transformer(name: str) -> str:
    """Return a tensor's name without the beginning that some checkpoints lack."""
    return name.removeprefix("transformer.")


_NAMES: Mapping[str, str] = {"layer_norm_eps": "layer_norm_epsilon"}
_FOUR_TIMES: Mapping[str, Key] = {"feed_forward_length": lambda numbers: 4 * numbers.decoder.hidden}
"""The class has no setting for the width of the feed-forward network."""


def _clamp(numbers: Numbers) -> float | None:
    """Return the largest value of queries, keys and values; None if there is no limit."""
    attention = numbers.decoder.settings.get("attn_config")
    return CONFIG_VALUES.optional_number(attention, "clip_qkv") if isinstance(attention, Mapping) else None


_MPT: Mapping[str, Key] = {
    **_FOUR_TIMES,
    "attention.max_alibi_bias": lambda _: 8.0,  # the class has no other, whatever settings say
    "attention.clamp_kqv": _clamp,
}

_OLMO_EPSILON = 1e-5
"""OLMo's own code has this number, and no setting for it."""

LAYER_NORM: tuple[Architecture, ...] = (
    Architecture(
        "command-r",
        DecoderClass(
            "CohereForCausalLM",
            {
                "max_position_embeddings": 8192,
                "layer_norm_epsilon": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
                "logit_scale": 0.0625,
            },
            names=_NAMES,
        ),
        assumes={**SILU_WITHOUT_BIAS, **TIED},
        rope=("default",),
        keys={
            "logit_scale": lambda numbers: numbers.number("logit_scale"),
            # Older files name the length of the trained texts so, and a shorter one as usual.
            "context_length": lambda numbers: numbers.whole("model_max_length", "max_position_embeddings"),
        },
        refuses=first_of(other_width, other_head_norms),
        notes="norms of queries and keys from 64 layers on",
    ),
    Architecture(
        "cohere2",
        DecoderClass(
            "Cohere2ForCausalLM",
            {
                "max_position_embeddings": 8192,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "logit_scale": 0.0625,
                "sliding_window": 4096,
            },
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=4,
            names=_NAMES,
        ),
        assumes={**SILU_WITHOUT_BIAS, **TIED},
        rope=("default",),
        has_windows=True,
        keys={
            "logit_scale": lambda numbers: numbers.number("logit_scale"),
            "attention.sliding_window_pattern": local_layers,
        },
        refuses=first_of(other_width, unlisted_windows),
    ),
    Architecture(
        "olmo",
        DecoderClass("OlmoForCausalLM", {"max_position_embeddings": 2048}),
        assumes=SILU_WITHOUT_BIAS,
        paired=True,
        keys={
            "attention.layer_norm_epsilon": lambda _: _OLMO_EPSILON,
            "attention.clamp_kqv": lambda numbers: numbers.optional_number("clip_qkv"),
        },
        needs=("token_embd.weight",),
        refuses=other_width,
        notes="norms without weights",
    ),
    Architecture(
        "phi2",
        DecoderClass(
            "PhiForCausalLM",
            {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
            names=_NAMES,
        ),
        assumes={**GELU, **UNTIED, "qk_layernorm": (False,)},
        partial=True,
        refuses=other_width,
    ),
    Architecture(
        "gpt2",
        CLASSES["GPT2LMHeadModel"],
        assumes={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        rope=(),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ),
    Architecture(
        "gptneox",
        DecoderClass(
            "GPTNeoXForCausalLM",
            {
                "max_position_embeddings": 2048,
                "layer_norm_epsilon": 1e-5,
                "partial_rotary_factor": 0.25,
                "use_parallel_residual": True,
            },
            names={**_NAMES, "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
            kv_heads=_all_heads,
        ),
        assumes={**GELU, **UNTIED, "attention_bias": (True,)},
        partial=True,
        tensors={
            f"attention.query_key_value.{end}": (Target(f"attn_qkv.{end}", _heads_apart),) for end in ("weight", "bias")
        },
        keys={"use_parallel_residual": lambda numbers: numbers.flag("use_parallel_residual")},
        refuses=other_width,
        notes="queries, keys and values of all heads behind each other",
    ),
    Architecture(
        "starcoder",
        DecoderClass(
            "GPTBigCodeForCausalLM",
            {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "multi_query": True},
            kv_heads=lambda settings: 1 if settings.get("multi_query") else None,
        ),
        assumes={
            "activation_function": GELU["hidden_act"],
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
        },
        rope=(),
        tensors={f"attn.c_attn.{end}": (Target(f"attn_qkv.{end}", _heads_apart),) for end in ("weight", "bias")},
        notes="queries, keys and values of all heads behind each other",
    ),
    Architecture(
        "starcoder2",
        DecoderClass(
            "Starcoder2ForCausalLM",
            {
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
            },
            windowed=Windowed.ALWAYS,
            names={"norm_epsilon": "layer_norm_epsilon"},
        ),
        assumes={**GELU, "use_bias": (True,)},
        refuses=other_width,
    ),
    Architecture(
        "bloom",
        DecoderClass(
            "BloomForCausalLM",
            {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            names={"n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
            kv_heads=_all_heads,
            positions=2048,
        ),
        assumes={"apply_residual_connection_post_layernorm": (False,)},
        rope=(),
        rename=_without_transformer,
        tensors={
            f"self_attention.query_key_value.{end}": (Target(f"attn_qkv.{end}", _heads_apart),)
            for end in ("weight", "bias")
        },
        keys=_FOUR_TIMES,
        notes="queries, keys and values of all heads behind each other",
    ),
    Architecture(
        "falcon",
        DecoderClass(
            "FalconForCausalLM",
            {
                "max_position_embeddings": 2048,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "alibi": False,
                "new_decoder_architecture": False,
                "multi_query": True,
                "parallel_attn": True,
            },
            names={"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size"},
            kv_heads=_falcon_heads,
        ),
        assumes={
            "activation": GELU["hidden_act"],
            "alibi": (False,),
            "bias": (False,),
            "parallel_attn": (True,),
        },
        tensors={"self_attention.query_key_value.weight": (Target("attn_qkv.weight", _heads_apart),)},
        refuses=other_width,
        notes="queries, keys and values of all heads behind each other; one norm or two",
    ),
    Architecture(
        "mpt",
        DecoderClass(
            "MptForCausalLM",
            {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            names={
                "d_model": "hidden_size",
                "n_heads": "num_attention_heads",
                "n_layers": "num_hidden_layers",
                "max_seq_len": "max_position_embeddings",
            },
            kv_heads=_all_heads,
        ),
        assumes={"no_bias": (True,), "logit_scale": ()},
        exact_gelu=True,
        rope=(),
        keys=_MPT,
        refuses=other_attention,
        notes="queries, keys and values may be clamped",
    ),
    Architecture(
        "stablelm",
        DecoderClass(
            "StableLmForCausalLM",
            {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.25},
            names=_NAMES,
        ),
        assumes={**SILU, **UNTIED},
        partial=True,
        stacks={
            "self_attn.q_layernorm.norms.": "attn_q_norm.weight",
            "self_attn.k_layernorm.norms.": "attn_k_norm.weight",
        },
        refuses=other_width,
        notes="norms of single heads become one tensor",
    ),
    Architecture(
        "nemotron",
        DecoderClass(
            "NemotronForCausalLM",
            {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
            norm_offset=1.0,
            names={"norm_eps": "layer_norm_epsilon"},
        ),
        assumes={**UNTIED, "hidden_act": ("relu2",)},
        partial=True,
        refuses=other_width,
    ),
    Architecture(
        "jais2",
        DecoderClass("Jais2ForCausalLM", {"max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5}, names=_NAMES),
        assumes={**UNTIED, "hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
    ),
)
"""In the order in which they are named to users."""
