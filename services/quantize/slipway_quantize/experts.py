"""How checkpoints store the experts of a mixture, and the names that loaders read of experts one by one.

Imports no libraries, so that a plan can be refused before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.levels import QuantizationLevel
from slipway.model.configuration import ModelConfig
from slipway_quantize.sensitive import kept_names

EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.(?P<projection>[^.]+)")
"""Name of the module that an expert's projection would be."""
TARGET = r"re:.*\.experts\.\d+\..*"
"""Target of a scheme for all experts: transformers takes the scheme of a target that names them, and vLLM that of the names."""
STACKS = r"re:.*\.experts(\..*)?$"
"""Experts in ``ignore``, for a folder in which all of them keep their type: vLLM asks for the names of one expert's projections."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts that checkpoints store as stacks, and how one expert's matrices are named and cut out of them.

    Attributes:
        gate_up: End of the name of the stack of gates and what they multiply, (experts, 2I, H).
        down: End of the name of the stack of second products, (experts, H, I).
        names: Names of an expert's matrices behind ``experts.N``: gate, up, down.
        transposed: Whether each matrix is stored as (in, out).
        reloads: Whether transformers reads experts one by one.
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    reloads: bool = True


_PLAIN = Mixture()
_NUMBERED = Mixture(names=("w1", "w3", "w2"))
_GRANITE = Mixture("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", reloads=False)
MIXTURES: Mapping[str, Mixture] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next"), _PLAIN),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _PLAIN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe"), _PLAIN),
    **dict.fromkeys(("mixtral", "lfm2_moe"), _NUMBERED),
    **dict.fromkeys(("llama4", "llama4_text"), Mixture(transposed=True)),
    "granitemoehybrid": _GRANITE,
    # vLLM's loaders of these two know the names of Mixtral's experts.
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"),
        Mixture(_GRANITE.gate_up, _GRANITE.down, _NUMBERED.names, reloads=False),
    ),
}
"""By ``model_type``. Checkpoints of other types may have their experts one by one, under names that need no table."""

OPENAI_TYPE, OPENAI_LEVEL = "gpt_oss", "mxfp4"
"""The type of models whose experts have a form of their own, and the level at which they are written in it."""
_STACKED = frozenset(
    ("aria", "aria_text", "dbrx", "gemma4", "gemma4_text", "jetmoe", "qwen3_vl_moe", "qwen3_vl_moe_text")
)
"""Types whose checkpoints have stacks that no level here reads: their experts keep their type, and the other layers are rounded."""
_UNREAD: Mapping[str, str] = {
    "int-quantized": "transformers unpacks no experts in int8 with a scale per output feature",
    "nvfp4-pack-quantized": "transformers leaves out the second scale of experts in NVFP4, and computes nonsense",
}
"""Forms of compressed-tensors in which vLLM reads experts and transformers 5.23 does not, with the reason."""
_FORMS: Mapping[str, str] = {"w8a8": "int-quantized", "nvfp4": "nvfp4-pack-quantized"}
_INSTEAD: Mapping[str, str] = {"w8a8": "fp8 or int8", "nvfp4": "mxfp4 or int4"}


def mixture_of(config: Mapping[str, Any]) -> Mixture | None:
    """Return how a model's experts are stored as stacks, by its ``config.json``; None if that is not known."""
    return MIXTURES.get(model_type(config))


def model_type(config: Mapping[str, Any]) -> str:
    """Return the type of a model's text part; empty if it is unnamed."""
    text = config.get("text_config")
    named = (text.get("model_type") if isinstance(text, Mapping) else None) or config.get("model_type")
    return str(named or "")


def keeps_experts(keep: Collection[str]) -> bool:
    """Return whether ``keep`` names all experts of a model."""
    return any(f".{name}".endswith(".experts") for name in kept_names(keep))


def experts_refusal(level: QuantizationLevel, keep: Collection[str], config: ModelConfig) -> str:
    """Return why a level below 16 bits is not made of a mixture as transformers folder; empty if it is.

    Args:
        level: The level.
        keep: The parameter of the stage.
        config: The model's ``config.json``.
    """
    kind = model_type(config)
    if not config.mixes_experts or kind in _STACKED or (keeps_experts(keep) and kind == OPENAI_TYPE):
        return ""
    what = f"level {level.name} is not made of a {config.description}, which is a mixture of experts"
    if kind == OPENAI_TYPE and level.name != OPENAI_LEVEL:
        return (
            f"{what}: transformers and vLLM read its experts as stacks with interleaved columns and biases, or as MXFP4, and vLLM "
            f"passes over experts one by one without a word. Use {OPENAI_LEVEL} or GGUF, or name experts in keep to leave them in 16 bits"
        )
    if level.name == "fp8_static":
        return f"{what}: vLLM takes no fixed range for the inputs of experts: use fp8"
    if level.name in _FORMS:
        return f"{what}: {_UNREAD[_FORMS[level.name]]}, so nothing could be compared: use {_INSTEAD[level.name]}"
    mixture = mixture_of(config)
    if mixture is not None and not mixture.reloads:
        return f"{what}: {_ONE_BY_ONE}, so nothing could be compared: use bf16, or GGUF"
    return ""


_ONE_BY_ONE = "transformers reads the experts of this type as stacks alone, though vLLM reads them one by one"
