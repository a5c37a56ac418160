"""Compute again in float32 the buffers that a model's class makes by itself and does not store, such as the scale of some embeddings.

transformers makes them in the type in which it loads a model, so they are rounded where that has 16 bits: Gemma's scale of 33.94 is 34 in bfloat16.
Widening the stored weights is exact, and widening these is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

_LOADED = "_is_hf_initialized"
"""By this mark transformers knows tensors that are not to be made again."""


_NOT_MADE = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)
"""What the code of a class raises for a layer that it cannot begin anew."""


def recompute_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Compute buffers again, in their present type, as the model's class computes them when it is loaded.

    Args:
        model: A model, in peft's wrapper or without; what it has stored stays as it is.
        names: Names of tensors that were rounded when it was loaded; those that it stores are left out.
    """
    by_owner: dict[str, set[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        if own in model.get_submodule(owner)._non_persistent_buffers_set:
            by_owner.setdefault(owner, set()).add(own)
    for owner, rounded in sorted(by_owner.items()):
        module = model.get_submodule(owner)
        # A layer whose weight is packed has none to be left as it is; then its class makes nothing, and its buffers stay rounded.
        with torch.no_grad(), init.guard_torch_init_functions(), _keep(module, but=rounded), suppress(*_NOT_MADE):
            _class_of(model, owner)._init_weights(module)


def _class_of(model: nn.Module, path: str) -> Any:
    """Return the model of transformers that a module is a direct part of; a model of several parts has one for each."""
    parts = path.split(".")
    outer = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    return next(each for each in outer if isinstance(each, PreTrainedModel))


@contextmanager
def _keep(module: nn.Module, *, but: Collection[str]) -> Iterator[None]:
    """Mark a module's own tensors but these as loaded, so that its class leaves them as they are."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    before = [(tensor, getattr(tensor, _LOADED, None)) for _, tensor in own]
    for name, tensor in own:
        setattr(tensor, _LOADED, name not in but)
    try:
        yield
    finally:
        for tensor, mark in before:
            if mark is None:
                delattr(tensor, _LOADED)
            else:
                setattr(tensor, _LOADED, mark)
