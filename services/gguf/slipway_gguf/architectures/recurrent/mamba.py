"""Architectures with recurrent layers of Mamba, alone or with a little attention (Jamba). Data, and light.

Sources: llama.cpp's ``conversion/mamba.py`` and ``jamba.py``, ``src/models/mamba.cpp`` and ``jamba.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import Architecture, Change, Key, Numbers, Piece, Target, kv_heads_by_layer
from slipway_gguf.architectures.recurrent.mamba_2 import PURE_ASSUMES, PURE_KEYS, UNLIMITED
from slipway_gguf.architectures.refusals import other_expansion, other_width
from slipway_gguf.architectures.settings import SILU, Assumed
from slipway_gguf.architectures.views import without_middle


def _mamba(prefix: str) -> Mapping[str, tuple[Target, ...]]:
    """Return what becomes of the tensors of a recurrent layer of Mamba, whose names begin with ``prefix``."""
    return {
        f"{prefix}.A_log": (Target("ssm_a", change=Change.NEGATED_EXPONENTIAL),),
        f"{prefix}.D": (Target("ssm_d"),),
        f"{prefix}.conv1d.weight": (Target("ssm_conv1d.weight", lambda _: (Piece(form=without_middle),)),),
    }


def _rank(key: str) -> Key:
    """Return the rank of the time steps, which ``auto`` makes a sixteenth of the states' width."""

    def rank(numbers: Numbers) -> int:
        automatic = numbers.decoder.settings.get(key) in (None, "auto")
        return -(-numbers.decoder.hidden // 16) if automatic else numbers.whole(key)

    return rank


_JAMBA_ASSUMES: Assumed = {**SILU, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "mamba_expand": (2,)}
_JAMBA_KEYS: Mapping[str, Key] = {
    "attention.head_count_kv": kv_heads_by_layer,
    "ssm.conv_kernel": lambda numbers: numbers.whole("mamba_d_conv"),
    "ssm.state_size": lambda numbers: numbers.whole("mamba_d_state"),
    "ssm.inner_size": lambda numbers: numbers.whole("mamba_expand") * numbers.decoder.hidden,
    "ssm.time_step_rank": _rank("mamba_dt_rank"),
}


def _has_several_experts(settings: Mapping[str, Any]) -> bool:
    return settings.get("num_experts") != 1


def _in_periods(numbers: Numbers, layer: int) -> bool:
    """Return whether a layer has experts: one of each period (Jamba)."""
    return layer % numbers.whole("expert_layer_period") == numbers.count("expert_layer_offset")


_JAMBA = DecoderClass(
    "JambaForCausalLM",
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    by_layer=True,
)

_PURE: Mapping[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "tie_word_embeddings": True,
}
"""Defaults of the classes without attention."""

MAMBA: tuple[Architecture, ...] = (
    Architecture(
        "mamba",
        DecoderClass(
            "MambaForCausalLM",
            _PURE,
            positions=UNLIMITED,
            attends=False,
            by_layer=True,
        ),
        assumes=PURE_ASSUMES,
        rope=(),
        tensors=_mamba("mixer"),
        keys={**PURE_KEYS, "ssm.time_step_rank": _rank("time_step_rank")},
        refuses=other_expansion,
        notes="no attention; decay as −exp; inner states twice as wide as the others",
    ),
    Architecture(
        "mamba",
        DecoderClass(
            "FalconMambaForCausalLM",
            _PURE,
            positions=UNLIMITED,
            attends=False,
            by_layer=True,
        ),
        assumes=PURE_ASSUMES,
        rope=(),
        tensors=_mamba("mixer"),
        keys={**PURE_KEYS, "ssm.time_step_rank": _rank("time_step_rank"), "ssm.dt_b_c_rms": lambda _: True},
        refuses=other_expansion,
        notes="no attention; decay as −exp; time steps, B and C are normed, with the epsilon of all norms",
    ),
    Architecture(
        "jamba",
        _JAMBA,
        when=_has_several_experts,
        assumes=_JAMBA_ASSUMES,
        rope=(),
        experts=("num_experts",),
        sparse=_in_periods,
        tensors=_mamba("mamba"),
        keys=_JAMBA_KEYS,
        refuses=other_width,
        notes="attention in one layer of a period, and Mamba in the others: decay as −exp",
    ),
    Architecture(
        "jamba",
        _JAMBA,
        assumes=_JAMBA_ASSUMES,
        rope=(),
        tensors=_mamba("mamba"),
        keys=_JAMBA_KEYS,
        refuses=other_width,
        notes="attention in one layer of a period, and Mamba in the others: decay as −exp",
    ),
)
