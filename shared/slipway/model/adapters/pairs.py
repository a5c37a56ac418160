"""Recognise low-rank pairs among an adapter's tensors, whatever wraps their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import AdapterConfig
from slipway.model.model_files import ADAPTER_PREFIX
from slipway.model.safetensors_file import TensorInfo

#: ``<module>.lora_A[.<adapter>].weight``, and ``<module>.lora_embedding_A[.<adapter>]`` of an embedding.
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
EMBEDDING_PAIR = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(\.(?P<adapter>[^.]+))?")
#: The prefix, with the prefixes of wrappers around the model.
_WRAPPED = re.compile(r"^(?:.+?\.)?base_model\.model\.(?:(?:_orig_mod|module)\.)*")
#: The head as Tinker names it; to transformers it is ``lm_head``, beside the model and not in it.
_UNEMBEDDING = re.compile(rf"^({re.escape(ADAPTER_PREFIX)})?(?:model\.)?unembed_tokens(?=\.)")


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
    return _LINEAR.fullmatch(name) or EMBEDDING_PAIR.fullmatch(name)


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
    check_both(slot)
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


def check_both(slot: Mapping[str, TensorInfo]) -> None:
    """Refuse half a pair.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``.
    """
    if len(slot) != 2:
        present = next(iter(slot.values()))
        missing = ({"A", "B"} - set(slot)).pop()
        raise broken(f"tensor {present.name!r} has no partner lora_{missing}", present.name)


def broken(what: str, key: str) -> ModelMergeError:
    """Return the refusal of an adapter that lacks parts or contradicts itself; ``key`` is the tensor."""
    return ModelMergeError(
        f"the adapter is not complete or not consistent: {what}",
        reason="CHECKPOINT_INCOMPLETE",
        remedy="copy the checkpoint again, or use another one",
        about={"tensor": key},
    )
