"""Bring the weights of one block of a PyTorch model into the form in which it computes, and back into the form in which it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slipway.model.pytorch.joined_weights import is_left_out, make_joined
from slipway.model.pytorch.wide_layers import SMALLEST_VALUES, Crew, widen_layers

MADE = "made_weight"
"""Attribute of a layer for a weight that code makes for the calls of a block; it is dropped with the block."""


class BlockWeights:
    """The weights of a model that is computed block by block.

    They stay as they are stored: mapped from their files, and packed if compressed-tensors packed them. While a block computes, its weights are unpacked, and
    stacks of experts are joined. If results are compared in float32, layers widen theirs in pieces; small weights are widened once, and all others while their
    block computes.

    Args:
        model: The model, with its adapter if it has one.
        blocks: Its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._inside = [module for block in blocks for module in block.modules()]
        inside = set(self._inside)
        self._outside = [module for module in model.modules() if module not in inside]
        self._crew: Crew | None = None
        compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
        self._format = getattr(compressor, "force_compression_format", None)
        if compressor is not None:
            compressor.remove_decompression_hook(model)  # it would unpack all of it in the first call
        for module in self._outside:
            if _is_packed(module):
                _unpack(module, self._format)

    def widen(self) -> Callable[[], None]:
        """Compute in float32 from now on; return a function that undoes this."""
        crew = self._crew = Crew(torch.get_num_threads())
        undo = _widen(self._outside, crew)
        undo_inside = _widen([each for each in self._inside if not _is_packed(each)], crew, below=SMALLEST_VALUES)

        def restore() -> None:
            undo_inside()
            undo()
            crew.leave()
            self._crew = None

        return restore

    def hold(self, block: nn.Module) -> Callable[[], None]:
        """Bring a block's weights into memory; return a function that drops them."""
        modules = list(block.modules())
        undo = [_unpack(module, self._format) for module in modules if _is_packed(module)]
        undo += [make_joined(module, wide=self._crew is not None) for module in modules]
        if self._crew is not None:
            undo.append(_widen(modules, self._crew))

        def drop() -> None:
            for each in reversed(undo):
                each()
            for module in modules:
                module.__dict__.pop(MADE, None)

        return drop


def _is_packed(module: Any) -> bool:
    status = getattr(module, "quantization_status", None)
    return getattr(status, "value", None) == "compressed"


def _unpack(module: Any, form: Any) -> Callable[[], None]:
    from compressed_tensors.compressors import decompress_module  # only some models need it

    before = dict(module._parameters), dict(module._buffers), module.quantization_status
    decompress_module(module, form)

    def restore() -> None:
        module._parameters.clear()
        module._buffers.clear()
        module._parameters.update(before[0])
        module._buffers.update(before[1])
        module.quantization_status = before[2]

    return restore


def _widen(modules: list[nn.Module], crew: Crew, *, below: int = 1 << 62) -> Callable[[], None]:
    """Let large weights of plain layers be widened where they are used, and widen all others with fewer than so many values."""
    restore = widen_layers(modules, crew)
    before = [
        (value, value.data)
        for module in modules
        for value in (*module._parameters.values(), *module._buffers.values())
        if value is not None
        and value.is_floating_point()
        and value.dtype != torch.float32
        and value.numel() < below
        and not is_left_out(value)
    ]
    for value, stored in before:
        value.data = stored.float()

    def undo() -> None:
        for value, stored in before:
            value.data = stored
        restore()

    return undo
