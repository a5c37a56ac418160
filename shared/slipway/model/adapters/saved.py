"""Read an adapter as it was saved: its settings, its tensors' headers, and the low-rank pairs among them.

Plain LoRA is told from other adapters. Pairs are recognised whatever wraps their names. The module is light: a client looks at an
adapter before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import AdapterExportError, CheckpointValidationError, ModelMergeError
from slipway.model.adapters.adapter_config import AdapterConfig, parse_adapter_config
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

#: ``<module>.lora_A[.<adapter>].weight``, and ``<module>.lora_embedding_A[.<adapter>]`` of an embedding.
_LINEAR_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
EMBEDDING_PAIR = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(\.(?P<adapter>[^.]+))?")
#: ``ADAPTER_PREFIX``, with the prefixes of wrappers around the model.
_WRAPPED = re.compile(r"^(?:.+?\.)?base_model\.model\.(?:(?:_orig_mod|module)\.)*")
#: The head as Tinker names it; to transformers it is ``lm_head``, beside the model and not in it.
_UNEMBEDDING = re.compile(rf"^({re.escape(ADAPTER_PREFIX)})?(?:model\.)?unembed_tokens(?=\.)")


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
            raise broken_adapter_error(f"tensors {twin.name!r} and {key!r} stand for the same", key)
    if len(names) > 1:
        raise broken_adapter_error(
            f"it holds several adapters ({', '.join(sorted(names))}); save the one to deliver alone", key=""
        )
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


@dataclass(frozen=True, slots=True)
class Pair:
    """One LoRA pair.

    Linear: a is ``(r, in)``, b is ``(out, r)``. Embedding: a is ``(r, vocabulary)``, b is ``(features, r)``.
    """

    module: str
    embedding: bool
    a: TensorInfo
    b: TensorInfo
    rank: int
    scaling: float


def unwrap_name(key: str) -> str:
    """Return a tensor's name without the model's wrappers, and with transformers' name of the head."""
    return _UNEMBEDDING.sub(r"\1lm_head", _WRAPPED.sub(ADAPTER_PREFIX, key))


def pair_name(key: str) -> re.Match[str] | None:
    """Match the name of one half of a pair: groups ``module``, ``side`` (A or B) and ``adapter``; None for another tensor."""
    name = key.removeprefix(ADAPTER_PREFIX)
    return _LINEAR_PAIR.fullmatch(name) or EMBEDDING_PAIR.fullmatch(name)


def make_pair(module: str, embedding: bool, slot: Mapping[str, TensorInfo], config: AdapterConfig) -> tuple[str, Pair]:
    """Return the pair of a module, by the module's name.

    Args:
        module: Its name in the model.
        embedding: Whether the module is an embedding.
        slot: The stored halves, by side.
        config: Configuration of the adapter, which tells rank and scaling.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE`` for half a pair, ``ADAPTER_CONFIG_INVALID`` for shapes that cannot be right.
    """
    check_halves(slot)
    a, b = slot["A"], slot["B"]
    for info in (a, b):
        if len(info.shape) != 2 or 0 in info.shape:
            raise ModelMergeError(
                f"adapter tensor {info.name!r} has shape {info.shape}, which is not a matrix: its weights were not gathered "
                "when it was saved",
                reason="ADAPTER_CONFIG_INVALID",
                remedy="save it again, with its weights gathered",
                about={"tensor": info.name},
            )
    rank = config.rank_of(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelMergeError(
            f"module {module!r} has rank {rank} by adapter_config.json, but {a.name!r} is {a.shape} and "
            f"{b.name!r} is {b.shape}: the scaling would be wrong",
            reason="ADAPTER_CONFIG_INVALID",
            remedy="use the adapter_config.json that was saved with these weights (check r and rank_pattern)",
            about={"tensor": a.name, "rank": rank},
        )
    return module, Pair(module, embedding, a, b, rank, config.scaling_of(module))


def check_halves(slot: Mapping[str, TensorInfo]) -> None:
    """Refuse half a pair.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``.
    """
    if len(slot) != 2:
        present = next(iter(slot.values()))
        missing = ({"A", "B"} - set(slot)).pop()
        raise broken_adapter_error(f"tensor {present.name!r} has no partner lora_{missing}", present.name)


def broken_adapter_error(what: str, key: str) -> ModelMergeError:
    """Return the refusal of an adapter that lacks parts or contradicts itself; ``key`` is the tensor."""
    return ModelMergeError(
        f"the adapter is not complete or not consistent: {what}",
        reason="CHECKPOINT_INCOMPLETE",
        remedy="copy the checkpoint again, or use another one",
        about={"tensor": key},
    )
