"""Rotary embeddings that can be traced.

Where the frequencies depend on the longest text (dynamic NTK scaling, LongRoPE), transformers' code keeps them in a buffer that it
changes between calls, and decides by a branch on values whether to. A tracer loses the branch or refuses it. So a trace computes them
from the positions of each call.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from slipway.model.limits import GROWING, SWITCHING


def compute_frequencies_in_graph(model: torch.nn.Module) -> None:
    """Make a model's rotary embeddings functions of the positions, in place.

    A call gives what transformers' code gives for it after shorter texts.
    """
    for module in _changing_modules(model):
        module.forward = partial(_rotate, module, inspect.unwrap(type(module).forward))


def forget_longest_text(model: torch.nn.Module) -> None:
    """Reset rotary embeddings that have seen a long text.

    Without this, transformers' code gives a later text the frequencies of the longest one before it, unless it is shorter than
    those of the training.
    """
    first = torch.zeros(1, 1, dtype=torch.int64)
    for module in _changing_modules(model):
        for layers in _rope_kinds(module):
            module(first.float(), first, *([] if layers is None else [layers]))


def _changing_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules whose ``forward`` transformers wraps to change their frequencies."""
    for module in model.modules():
        wrapped = inspect.unwrap(type(module).forward) is not type(module).forward
        if wrapped and any(kind in (GROWING, SWITCHING) for kind in _rope_kinds(module).values()):
            yield module


def _rope_kinds(module: Any) -> dict[str | None, str]:
    """Return the type of a module's rotary embeddings by the type of its layers, or that for all layers under None."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: str(kinds)}


def _rotate(
    module: Any, forward: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a module's own code with the frequencies of this call. x gives the type; position_ids: (..., tokens)."""
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    before = module._buffers[name]
    module._buffers[name] = _frequencies(module, layer_type, position_ids)
    try:
        with torch.no_grad():
            return forward(module, x, position_ids, *([] if layer_type is None else [layer_type]))
    finally:
        module._buffers[name] = before


def _frequencies(module: Any, layer_type: str | None, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the frequencies for the longest text of a call, (size of a head / 2)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # a model with such frequencies has loaded it

    kind, config = _rope_kinds(module)[layer_type], module.config
    original: torch.Tensor = getattr(
        module, "original_inv_freq" if layer_type is None else f"{layer_type}_original_inv_freq"
    )
    if kind not in (GROWING, SWITCHING):
        return original
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    longest = position_ids.max() + 1
    trained: int = config.max_position_embeddings if kind == GROWING else settings["original_max_position_embeddings"]
    # The second set of LongRoPE is a constant; the frequencies of dynamic scaling are a function of the length.
    length = longest if kind == GROWING else trained + 1
    with warnings.catch_warnings():
        # The function makes tensors of settings only, which are the same in every call.
        warnings.filterwarnings("ignore", "torch.tensor results are registered as constants")
        beyond, _ = ROPE_INIT_FUNCTIONS[kind](config, position_ids.device, seq_len=length, layer_type=layer_type)
    return torch.where(longest > trained, beyond, original)
