"""Find routers of a mixture that an output stores more coarsely than in 16 bits.

A router chooses the experts of each token, so every level leaves it alone. Results of few tokens need not show that one is rounded: its weights
do, whatever form they have. Adapters seldom train it, so it is compared whether it is adapted or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import CannotBuildError, model_facts
from slipway.model.pytorch.conversions import conversions
from slipway.model.weights.parts import ModelPart
from slipway.model.weights.routers import is_router
from slipway_validate.runner.survival.adapted import Adapted, brought_names
from slipway_validate.runner.survival.experts import AdaptedMatrix

COARSEST = 2.0**-8
"""Largest error of a router, as a share of its size. Rounding to bfloat16 makes 2**-9.8, to int8 in groups of 32 2**-7.6."""
_DESCRIPTION, _ALLOWED = "quantization.json", "allowed"
_MATRIX = 2


def routers_of(
    base: ModelFolder, adapter: Path, modules: Sequence[Adapted], left_out: Collection[str]
) -> list[Adapted]:
    """Return the routers of a base, each with the adapter's update if it has one; none for a model without experts.

    Those that the adapter brings whole are left out: what they should be is not the base's.

    Args:
        base: The base.
        adapter: The adapter.
        modules: What the adapter updates.
        left_out: Names of modules with an update that is not known.
    """
    if not base.config.mixes_experts:
        return []
    head = {each.name for each in base.parts[ModelPart.MULTI_TOKEN_HEAD]}
    names = [
        name
        for name, info in base.tensors.items()
        if name.endswith(".weight") and len(info.shape) == _MATRIX and is_router(name.removesuffix(".weight"))
    ]
    adapted = {name: each for each in modules for name in (each.weight, each.stored) if name}
    in_model = _names_in_model(base)
    routers = [
        adapted.get(name) or _unchanged(name, in_model.get(name, ""))
        for name in sorted(names)
        if name not in head and name.removesuffix(".weight") not in left_out
    ]
    brought = {name.removesuffix(".weight") for name in brought_names(adapter) if name.endswith(".weight")}
    whole = {name for name in brought if is_router(name)}
    return [router for router in routers if not is_one_of(router, whole)]


def _names_in_model(base: ModelFolder) -> dict[str, str]:
    """Return the model's names of tensors by those in the base's files, which graphs need not have."""
    try:
        model = model_facts(base).model
    except CannotBuildError:
        return {}
    return {stored: name for name, stored in conversions(model, base.tensors).renamed.items()}


def _unchanged(name: str, in_model: str) -> AdaptedMatrix:
    return AdaptedMatrix(name.removesuffix(".weight"), name, lambda: torch.zeros(()), stored=in_model)


def is_rounded(error: float | None, *, coded: bool) -> bool:
    """Return whether a router is stored more coarsely than in 16 bits.

    Args:
        error: How far its weight is from what it should be, as a share of its size.
        coded: Whether it is stored as codes with scales.
    """
    return coded or (error or 0.0) > COARSEST


def rounded_on_request(folder: Path) -> tuple[str, ...]:
    """Return names of layers in an output that somebody asked to round, although they keep their type by default."""
    try:
        listed = read_json_object(folder / _DESCRIPTION, largest=LARGEST_LIST).get(_ALLOWED)
    except (OSError, ValueError):
        return ()
    return tuple(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()


def is_one_of(router: Adapted, names: Iterable[str]) -> bool:
    """Return whether a router has one of the names, in the base's files or in the model; either name may lack a prefix."""
    own = {name.removesuffix(".weight") for name in (router.name, router.weight, router.stored) if name}
    return any(
        f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}") for module in own for name in names
    )
