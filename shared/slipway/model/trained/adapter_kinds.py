"""Tell adapters that only add factors to linear layers, so that the base's weights can stay as they are stored."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.runs.checkpoints import read_adapter_config

_ANY = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("alpha_pattern", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "r", "rank_pattern"),
        *("exclude_modules", "fan_in_fan_out", "megatron_core", "qalora_group_size", "target_modules", "use_rslora"),
    )
)
"""Settings of plain LoRA, with any value."""
_FIXED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
"""Settings that only these values make plain LoRA."""


def is_plain_lora(adapter: Path) -> bool:
    """Return whether an adapter only adds products of two factors: it saves no weights of the base, and reads none.

    A setting that is not known here, and is set, makes it another kind.
    """
    try:
        config = read_adapter_config(adapter)
    except (CheckpointValidationError, OSError):  # loading it will report the error
        return False
    return all(value in _FIXED[name] if name in _FIXED else name in _ANY or not value for name, value in config.items())
