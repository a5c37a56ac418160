"""The graphs of an export and their interfaces: one graph for most families, an encoder and a decoder for encoder–decoders.

Names are those that the field's runtimes expect; ``present.N`` of one call is ``past_key_values.N`` of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipway.model.activations.request import Activation
from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.names import BATCH, MASK, PAST, POSITIONS, SEQUENCE, SOURCE, TOTAL

SAMPLE_SIZES = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, SOURCE: 7}
"""Sizes in the traced sample: different, and above 1, so that a tracer neither confuses axes nor fixes one as a constant."""

Call = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that runs a transformers model on tensors by input name, and returns tensors by output name."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or an output of a graph.

    Attributes:
        name: Its name.
        shape: Its axes: the name of one that varies, a size, or None for the size that the engine's graph has.
        dtype: Its data type.
        fill: Value in the traced sample.
    """

    name: str
    shape: tuple[str | int | None, ...]
    dtype: torch.dtype = torch.float32
    fill: int = 0

    @property
    def varying(self) -> dict[int, str]:
        """Return the axes that vary, by index."""
        return {index: axis for index, axis in enumerate(self.shape) if isinstance(axis, str)}

    def sample(self) -> torch.Tensor:
        """Return the tensor of a traced sample, filled with one value; a mask has ones, and two padding tokens in the first row."""
        sizes = [SAMPLE_SIZES[axis] if isinstance(axis, str) else axis or 1 for axis in self.shape]
        if not self.name.endswith("mask"):
            return torch.full(sizes, self.fill, dtype=self.dtype)
        mask = torch.ones(sizes, dtype=self.dtype)
        mask[0, : min(2, sizes[1] - 1)] = 0
        return mask


@dataclass(frozen=True, slots=True)
class ObservedActivations:
    """The activations among a graph's outputs.

    Attributes:
        layers: Number of the layers that the graph computes.
        modules: Path of each activation's module in transformers' model.
    """

    layers: int
    modules: Mapping[Activation, str]


@dataclass(frozen=True, slots=True)
class Component:
    """One graph of an export.

    Attributes:
        name: File name without ``.onnx``.
        inputs: Inputs, in order.
        outputs: Outputs, in order.
        call: Function that computes the outputs with transformers' model; None if an engine builds the graph without it.
        unread: Inputs that a graph need not read.
        observed: The activations among its outputs; None for none.
        promise: The calls that it takes, and the logits that it returns.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    call: Call | None
    unread: tuple[str, ...] = ()
    observed: ObservedActivations | None = None
    promise: Promise = EVERY_CALL

    @property
    def file(self) -> str:
        """Return the graph's file name."""
        return f"{self.name}.onnx"

    def module(self, model: Any) -> FlatModule:
        """Return a module whose inputs and outputs are plain tensors, in the order of the ports."""
        return FlatModule(model, self)

    def sample(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a traced sample. Positions count the tokens that are not padding."""
        tensors = {port.name: port.sample() for port in self.inputs}
        if POSITIONS in tensors and MASK in tensors:
            new = tensors[POSITIONS].shape[1]
            tensors[POSITIONS] = (tensors[MASK].cumsum(1) - 1).clamp(min=0)[:, -new:]
        return tuple(tensors.values())

    def fix_axes(self, sizes: Mapping[str, int]) -> Component:
        """Return the component with some axes fixed; ``sizes`` has the size by the axis' name."""

        def fix(ports: tuple[Port, ...]) -> tuple[Port, ...]:
            return tuple(
                replace(
                    port, shape=tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in port.shape)
                )
                for port in ports
            )

        return replace(self, inputs=fix(self.inputs), outputs=fix(self.outputs))


class FlatModule(torch.nn.Module):
    """A model of transformers that takes and returns plain tensors, in the order of a component's ports."""

    def __init__(self, model: Any, component: Component) -> None:
        super().__init__()
        self.model = model
        self._inputs = tuple(port.name for port in component.inputs)
        self._outputs = tuple(port.name for port in component.outputs)
        assert component.call is not None
        self._call = component.call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model."""
        results = self._call(self.model, dict(zip(self._inputs, tensors, strict=True)))
        return tuple(results[name] for name in self._outputs)


def ids(name: str, *axes: str) -> Port:
    """Return a port of integers."""
    return Port(name, axes, torch.int64)
