"""Read an adapter's settings and its tensors' headers, and tell plain LoRA. Light: a client looks at an adapter before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import AdapterExportError, CheckpointValidationError
from slipway.model.adapters.adapter_config import AdapterConfig, parse_adapter_config
from slipway.model.adapters.pairs import EMBEDDING_PAIR, Pair, broken, make_pair, pair_name, unwrap_name
from slipway.model.model_files import ADAPTER_PREFIX, ADAPTER_WEIGHTS
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import TensorInfo, read_safetensors

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


@dataclass(frozen=True, slots=True)
class Saved:
    """An adapter as it was saved.

    Attributes:
        folder: Its folder.
        raw: Content of ``adapter_config.json``.
        halves: Halves of pairs by module, whether the module is an embedding, and side.
        others: All other tensors, by their names in the model.
    """

    folder: Path
    raw: Mapping[str, Any]
    halves: Mapping[tuple[str, bool], Mapping[str, TensorInfo]]
    others: Mapping[str, TensorInfo]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the stored pairs, each once."""
        sizes = {half["A"].shape[0] for half in self.halves.values() if "A" in half and half["A"].shape}
        return tuple(sorted(sizes))

    @property
    def config(self) -> AdapterConfig:
        """Return the checked settings.

        Raises:
            ModelMergeError: As :func:`~slipway.model.adapters.adapter_config.parse_adapter_config`.
        """
        return parse_adapter_config(self.raw, (module for module, _ in self.halves))

    def pairs(self) -> list[Pair]:
        """Return the pairs, sorted by module.

        Raises:
            ModelMergeError: ``CHECKPOINT_INCOMPLETE``, ``ADAPTER_CONFIG_INVALID``.
        """
        config = self.config
        return [
            make_pair(module, embedding, slot, config)[1] for (module, embedding), slot in sorted(self.halves.items())
        ]


def read_saved(folder: Path) -> Saved:
    """Read an adapter.

    Raises:
        CheckpointValidationError: ``ADAPTER_CONFIG_MISSING``, ``ADAPTER_CONFIG_INVALID``, ``SAFETENSORS_CORRUPT``.
        AdapterExportError: ``CHECKPOINT_INCOMPLETE``: it has no safetensors.
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``: two tensors stand for the same.
    """
    raw, weights = read_adapter_config(folder), folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise AdapterExportError(
            f"the adapter has no {ADAPTER_WEIGHTS}",
            reason="CHECKPOINT_INCOMPLETE",
            remedy="save it as safetensors where you trust it: model.save_pretrained(…)",
            about={"file": weights},
        )
    halves: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    others: dict[str, TensorInfo] = {}
    names: set[str] = set()
    for key, info in read_safetensors(weights).tensors.items():
        name = unwrap_name(key)
        match = pair_name(name)
        if match is None:
            twin = others.setdefault(name.removeprefix(ADAPTER_PREFIX), info)
        else:
            names.add(match["adapter"] or "")
            slot = halves.setdefault((match["module"], match.re is EMBEDDING_PAIR), {})
            twin = slot.setdefault(match["side"], info)
        if twin is not info:
            raise broken(f"tensors {twin.name!r} and {key!r} stand for the same", key)
    if len(names) > 1:
        raise broken(f"it holds several adapters ({', '.join(sorted(names))}); save the one to deliver alone", key="")
    return Saved(folder, raw, halves, others)


def is_plain_lora(adapter: Path) -> bool:
    """Return whether an adapter only adds products of two factors: it saves no weights of the base, and reads none.

    A setting that is not known here, and is set, makes it another kind.
    """
    try:
        config = read_adapter_config(adapter)
    except (CheckpointValidationError, OSError):  # loading it will report the error
        return False
    return all(value in _FIXED[name] if name in _FIXED else name in _ANY or not value for name, value in config.items())
