"""What export and engines pass to each other: interfaces of graphs, requests with fixed sizes, graphs without weights.

Most families have one graph, encoder–decoders an encoder and a decoder. Names are those that the field's runtimes expect;
``present.N`` of one call is ``past_key_values.N`` of the next. Axes have fixed sizes in graphs whose shapes do not vary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.model.activations import Activation, ActivationRequest
from slipway.model.configuration import token_of
from slipway.model.families import DECODER, PAIRS, RAW_SPEECH
from slipway.model.graphs.calls import EVERY_CALL, Promise
from slipway.model.limits import position_thresholds
from slipway_onnx_export.ir_graphs import Statistics
from slipway_onnx_export.loading.conversion import Weight
from slipway_onnx_export.names import BATCH, FRAMES, MASK, PAST, POSITIONS, SAMPLES, SEQUENCE, SOURCE, TOTAL
from slipway_onnx_export.params import Attention, OnnxExportParams, Optimization, Runtime
from slipway_onnx_export.source import ModelSource

SAMPLE_SIZES = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, SOURCE: 7, SAMPLES: 4800, FRAMES: 11}
"""Sizes in the traced sample: different, and above 1, so that a tracer neither confuses axes nor fixes one as a constant.

Moonshine makes so many frames of so many samples.
"""

Call = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that runs a transformers model on tensors by input name, and returns tensors by output name."""

STATIC_TOKENS = 256
"""Tokens that a static graph has room for, unless parameters or the model say otherwise."""


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
        samples: Inputs of a traced sample by name, where the usual ones would mean nothing; None for the usual ones.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    call: Call | None
    unread: tuple[str, ...] = ()
    observed: ObservedActivations | None = None
    promise: Promise = EVERY_CALL
    samples: Mapping[str, torch.Tensor] | None = field(default=None, compare=False)

    @property
    def file(self) -> str:
        """Return the graph's file name."""
        return f"{self.name}.onnx"

    def module(self, model: Any) -> FlatModule:
        """Return a module whose inputs and outputs are plain tensors, in the order of the ports."""
        return FlatModule(model, self)

    def sample(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a traced sample. Positions count the tokens that are not padding."""
        if self.samples is not None:
            return tuple(self.samples[port.name] for port in self.inputs)
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


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A request to an engine: the parameters that shape the graph, with the chosen opset and the activations to return."""

    opset: int
    runtime: Runtime
    optimization: Optimization = "all"
    attention: Attention = "auto"
    cache: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Fixed sizes of axes that do not vary, by name."""
    prove_warnings: bool = False
    promise: Promise = EVERY_CALL
    activations: ActivationRequest | None = None
    layered: bool = False
    pictures: bool = False
    """Whether a model that takes images has graphs for them too."""

    def attentions(self, *default: str) -> tuple[str, ...]:
        """Return the attention implementations to try in turn: the requested one, or the engine's defaults."""
        return default if self.attention == "auto" else (self.attention,)


@dataclass(frozen=True, slots=True)
class EngineGraph:
    """A graph without weights.

    Attributes:
        component: Its interface.
        model: The graph. Inputs and outputs have the usual names; every weight is an initializer without a value.
        weights: The tensor of each such initializer (a view of the source's mapped files), by name.
        attention: The attention implementation that was traced; empty if the graph was built.
        unproven: Places where the trace depends on its sample, unless the comparison with PyTorch shows otherwise.
        unoptimized: The graph's nodes before it was optimized.
    """

    component: Component
    model: ir.Model
    weights: Mapping[str, Weight]
    attention: str = ""
    unproven: tuple[str, ...] = ()
    unoptimized: Statistics = field(default_factory=Statistics)


def fixed_sizes(source: ModelSource, params: OnnxExportParams) -> dict[str, int]:
    """Return the fixed size of each axis that does not vary, by name.

    Raises:
        ONNXExportError: ``SHAPES_UNSUPPORTED`` if a static graph of the model would compute something else, or if the model has no
            room for the sizes.
    """
    if params.shapes == "dynamic":
        return {}
    if params.shapes == "batch":
        return {BATCH: params.batch}
    caches = source.family is DECODER and params.cache
    if source.family is RAW_SPEECH:
        raise _static_graph_error(
            source,
            "it takes samples of sound, whose number differs from sound to sound",
            "set shapes to batch or dynamic",
        )
    if params.cache and source.family in PAIRS:
        raise _static_graph_error(
            source, "a decoder with an encoder counts positions by the length of its cache, which a static graph fixes",
            "set cache to false, or shapes to batch",
        )  # fmt: skip
    if caches and source.sliding_window:
        raise _static_graph_error(
            source, f"its attention window of {source.sliding_window} tokens would count unused places of a static cache",
            "set cache to false, or shapes to batch",
        )  # fmt: skip
    room, changes = room_of(source), position_thresholds(source.text_config)
    if changes and changes[0] < room:
        room = changes[0]
    sequence = params.sequence or (1 if caches else min(STATIC_TOKENS, room))
    past = (params.past or max(min(STATIC_TOKENS, room) - sequence, 1)) if caches else 0
    if sequence + past > room:
        what = f"sequence {sequence} and past {past}" if past else f"sequence {sequence}"
        why = f"it has room for {room} tokens"
        if changes[:1] == (room,):
            # A text is cut into calls of a fixed length, and cached keys keep the rotation of their call.
            why = f"beyond {room} tokens its positions count otherwise, which calls of a fixed length would mix"
        raise _static_graph_error(
            source, f"{why}, and {what} need more", "set smaller sizes, or shapes to batch or dynamic"
        )
    return {BATCH: params.batch, SEQUENCE: sequence, SOURCE: sequence, PAST: past, TOTAL: sequence + past}


def room_of(source: ModelSource) -> int:
    """Return how many tokens the model has positions for."""
    config = source.config if source.family in PAIRS else source.text_config
    names = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "n_positions")
    room = min((limit for name in names if (limit := getattr(config, name, None))), default=1 << 20)
    if source.family is DECODER or source.family in PAIRS:
        return int(room)
    # RoBERTa and its kin number positions from after the padding token's id, which is then one of the first.
    reserved = 1 + (token_of(config, "pad_token_id") or 0)
    return int(room) - reserved if reserved < room else int(room)


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Describe fixed sizes for people; empty if all axes vary."""
    shown = ", ".join(f"{name} {sizes[name]}" for name in (BATCH, SEQUENCE, PAST) if sizes.get(name))
    return f"{shown} of the ONNX model {'are' if ',' in shown else 'is'} fixed" if shown else ""


def _static_graph_error(source: ModelSource, why: str, remedy: str) -> ONNXExportError:
    return ONNXExportError(
        f"{source.architecture} cannot have a static graph of this form: {why}",
        reason="SHAPES_UNSUPPORTED",
        remedy=remedy,
        about={"family": source.family.name, "architecture": source.architecture},
    )
