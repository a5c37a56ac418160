"""Make weights that transformers joins from several stored ones, such as stacks of experts, only while their block computes.

transformers joins them when it loads a model: a second copy of nearly all weights of a mixture, which is in no file and so stays in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter
from transformers.modeling_layers import GradientCheckpointingLayer

from slipway.model.safetensors_file import TensorInfo

_JOINED = "joined_weights"
"""Attribute of a module: by the name of a parameter, how it is made."""
_ONE_AFTER_ANOTHER = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable that keeps transformers from reading stored tensors ahead, before anything asks for them."""
_STACK = 3
"""Fewest axes of a parameter that is made late."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A stored tensor that transformers is to read, with its name."""

    name: str
    read: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.read()


@dataclass(frozen=True, slots=True)
class _JoinedWeight:
    """A parameter that is made of stored tensors.

    Attributes:
        name: Its name in the model.
        model: The model, which conversions may ask.
        converter: transformers' conversion, which has no tensors but while it makes the parameter.
        parts: The stored tensors in order, by the pattern of their names.
        place: A tensor of its shape and type that takes no memory.
    """

    name: str
    model: Any
    converter: WeightConverter
    parts: Mapping[str, tuple[TensorInfo, ...]]
    place: Tensor

    def make(self) -> Tensor:
        """Read and join the stored tensors.

        Raises:
            ValueError: They do not make the parameter that the model has.
        """
        reads_packed = any(getattr(each, "hf_quantizer", None) for each in self.converter.operations)
        files: dict[Any, Any] = {}
        for pattern, infos in self.parts.items():
            for info in infos:
                if info.file not in files:
                    files[info.file] = safe_open(info.file, framework="pt")
                value = files[info.file].get_tensor(info.name)
                value = value if reads_packed else value.to(self.place.dtype)
                self.converter.add_tensor(self.name, info.name, pattern, value)
        made = self.converter.convert(self.name, model=self.model, config=self.model.config)
        values = made.get(self.name)
        value = values[0] if isinstance(values, list) else values
        if value is None or value.shape != self.place.shape:
            raise ValueError(f"the stored weights of {self.name} do not make one of {tuple(self.place.shape)}")
        return value


@contextmanager
def leave_joined_out(stored: Mapping[str, TensorInfo]) -> Iterator[None]:
    """Let a model that transformers loads within the block have no joined weights; :func:`make_joined` makes them.

    Args:
        stored: The tensors of its files.
    """
    convert, before = WeightConverter.convert, os.environ.get(_ONE_AFTER_ANOTHER)

    def add_named(self: WeightConverter, target: str, source: str, pattern: str, read: Any) -> None:
        super(WeightConverter, self).add_tensor(target, source, pattern, _Named(source, read))

    def convert_or_leave(self: WeightConverter, name: str, model: Any = None, **given: Any) -> dict[str, Any]:
        if joined := _find_joined(self, name, model, stored):
            owner, _, parameter = name.rpartition(".")
            model.get_submodule(owner).__dict__.setdefault(_JOINED, {})[parameter] = joined
            return {name: joined.place}
        return convert(self, name, model=model, **given)

    os.environ[_ONE_AFTER_ANOTHER] = "1"
    WeightConverter.add_tensor, WeightConverter.convert = add_named, convert_or_leave
    try:
        yield
    finally:
        WeightConverter.convert = convert
        del WeightConverter.add_tensor
        if before is None:
            del os.environ[_ONE_AFTER_ANOTHER]
        else:
            os.environ[_ONE_AFTER_ANOTHER] = before


def is_left_out(value: Tensor) -> bool:
    """Return whether a parameter only has the place of a joined weight, whose values are not there."""
    return value.untyped_storage().nbytes() < value.nbytes


def make_joined(module: nn.Module, *, wide: bool) -> Callable[[], None]:
    """Make the joined weights of a module, in float32 if they are to be wide; return a function that drops them."""
    before = {}
    for name, joined in module.__dict__.get(_JOINED, {}).items():
        value = joined.make()
        before[name] = module._parameters[name]
        module._parameters[name] = nn.Parameter(value.float() if wide else value, requires_grad=False)
        del value  # the next one is made without the 16 bits of this one

    def drop() -> None:
        module._parameters.update(before)

    return drop


def _find_joined(
    converter: WeightConverter, name: str, model: Any, stored: Mapping[str, TensorInfo]
) -> _JoinedWeight | None:
    """Return how a parameter is made if it is a stack within a block; None for what transformers makes at once."""
    owner, _, short = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters.get(short)
    makes_more = len(converter.target_patterns) > 1 or converter.quantization_operation is not None
    if makes_more or parameter is None or parameter.dim() < _STACK:
        return None
    blocks = (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
    if not any(module is each for block in blocks for each in block.modules()):
        return None
    parts = {
        pattern: tuple(stored[each.name] for each in named) for pattern, named in converter.collected_tensors.items()
    }
    converter.collected_tensors.clear()
    place = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return _JoinedWeight(name, model, converter, parts, place)
