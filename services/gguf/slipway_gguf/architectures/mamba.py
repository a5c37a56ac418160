"""Architectures with recurrent layers of Mamba and no attention (Mamba, Mamba-2), or little of it (Jamba). Data, and light.

Sources: llama.cpp's ``conversion/mamba.py`` and ``jamba.py``, ``src/models/mamba.cpp`` and ``jamba.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway_gguf.architectures.entry import Architecture, Change, Key, Numbers, Piece, Target, kv_heads_by_layer
from slipway_gguf.architectures.mamba_2 import mamba2
from slipway_gguf.architectures.refusals import limited_steps, other_expansion, other_width
from slipway_gguf.architectures.settings import SILU, Assumed
from slipway_gguf.architectures.views import without_middle

_PURE_ASSUMES: Assumed = {"hidden_act": ("silu", "swish"), "use_bias": (False,), "use_conv_bias": (True,)}
_PURE_KEYS: Mapping[str, Key] = {
    "feed_forward_length": lambda _: 0,
    "attention.head_count": lambda _: 0,
    "attention.head_count_kv": lambda _: 0,
    "attention.key_length": lambda _: None,
    "attention.value_length": lambda _: None,
    # llama.cpp reads the epsilon of these norms, which have no mean, by this name.
    "attention.layer_norm_rms_epsilon": lambda numbers: numbers.number("layer_norm_epsilon"),
    "attention.layer_norm_epsilon": lambda _: None,
    "ssm.conv_kernel": lambda numbers: numbers.whole("conv_kernel"),
    "ssm.state_size": lambda numbers: numbers.whole("state_size"),
    "ssm.inner_size": lambda numbers: numbers.whole("expand") * numbers.decoder.hidden,
}
"""Keys of models without attention."""


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


MAMBA: tuple[Architecture, ...] = (
    Architecture(
        "mamba",
        "MambaForCausalLM",
        assumes=_PURE_ASSUMES,
        rope=(),
        tensors=_mamba("mixer"),
        keys={**_PURE_KEYS, "ssm.time_step_rank": _rank("time_step_rank")},
        refuses=other_expansion,
    ),
    Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        assumes=_PURE_ASSUMES,
        rope=(),
        tensors=mamba2("mixer", "n_groups"),
        keys={
            **_PURE_KEYS,
            "ssm.group_count": lambda numbers: numbers.whole("n_groups"),
            "ssm.time_step_rank": lambda numbers: numbers.whole("num_heads"),
        },
        refuses=limited_steps,
    ),
    Architecture(
        "jamba",
        "JambaForCausalLM",
        when=_has_several_experts,
        assumes=_JAMBA_ASSUMES,
        rope=(),
        experts=("num_experts",),
        sparse=_in_periods,
        tensors=_mamba("mamba"),
        keys=_JAMBA_KEYS,
        refuses=other_width,
    ),
    Architecture(
        "jamba",
        "JambaForCausalLM",
        assumes=_JAMBA_ASSUMES,
        rope=(),
        tensors=_mamba("mamba"),
        keys=_JAMBA_KEYS,
        refuses=other_width,
    ),
)
