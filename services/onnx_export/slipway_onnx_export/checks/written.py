"""The written graphs that an export's checks read, without their weights, and inputs made from what a graph declares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from slipway.model.graphs.calls import Promise
from slipway.model.graphs.pictures import TYPES
from slipway_onnx_export.names import (
    BATCH,
    CACHE,
    FEATURES,
    FRAMES,
    IMAGE_TOKENS,
    IMAGES,
    PAST,
    SAMPLES,
    SEQUENCE,
    SOURCE,
    TOTAL,
    VALUES,
)

TINY_BYTES, TINY_NODES = 4 << 20, 3000
"""Largest graphs that the checks run; that takes a fraction of a second."""
SOUND_SAMPLES = 4800
"""Samples of sound: Moonshine makes 11 frames of them."""

_FLOATS: Mapping[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
}


class FaultError(Exception):
    """A written graph fails a check. The message says how."""


class NotRunError(Exception):
    """A check cannot be made of this model. The message says why."""


class PortLike(Protocol):
    """An input or an output."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def shape(self) -> Sequence[str | int | None]:
        """Return its axes."""
        ...


class GraphLike(Protocol):
    """A graph's file and interface, as :class:`slipway_onnx_export.interface.Component` has them."""

    @property
    def file(self) -> str:
        """Return its file name."""
        ...

    @property
    def inputs(self) -> Sequence[PortLike]:
        """Return its inputs."""
        ...

    @property
    def outputs(self) -> Sequence[PortLike]:
        """Return its outputs."""
        ...

    @property
    def unread(self) -> Collection[str]:
        """Return the inputs that it need not read."""
        ...

    @property
    def promise(self) -> Promise:
        """Return the calls that it takes."""
        ...


@dataclass(frozen=True)
class WrittenFolder:
    """A written folder, and the request that it was written for.

    Attributes:
        folder: The folder.
        components: Interfaces of its graphs.
        opset: The requested opset.
        end: Token that ends a text, if the model has one.
        metadata: Properties that the file of every graph has.
        left_out: Weights that are inputs of a graph, by its file.
    """

    folder: Path
    components: tuple[GraphLike, ...]
    opset: int
    end: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)

    @cached_property
    def graphs(self) -> Mapping[str, Any]:
        """Return each graph by its file name, without external data.

        Raises:
            FaultError: If a file cannot be read.
        """
        models = {}
        for component in self.components:
            try:
                models[component.file] = onnx.load(self.folder / component.file, load_external_data=False)
            except Exception as error:  # protobuf's own errors have no common class
                raise FaultError(f"{component.file} cannot be read: {type(error).__name__}: {error}") from error
        return models

    def initializers(self) -> Iterator[tuple[str, Any]]:
        """Yield every initializer with its file's name."""
        for name, model in self.graphs.items():
            for tensor in model.graph.initializer:
                yield name, tensor

    @cached_property
    def tiny(self) -> bool:
        """Return whether the graphs are small enough to be run by the checks, and have their weights."""
        if any(self.left_out.values()):
            return False
        nbytes = sum(path.stat().st_size for path in self.folder.iterdir())
        return nbytes <= TINY_BYTES and sum(len(model.graph.node) for model in self.graphs.values()) <= TINY_NODES

    def feed(self, component: GraphLike, *, past: int, new: int) -> dict[str, npt.NDArray[Any]]:
        """Make inputs of a graph without padding.

        Raises:
            NotRunError: If an input has an axis that is not known here.
        """
        if not any(port.name.startswith(CACHE) for port in component.inputs):
            past = 0  # each call reads the text from its beginning
        rows = 1 if component.promise.shared_buffer and past else 2
        sizes = {BATCH: rows, SEQUENCE: new, PAST: past, TOTAL: past + new, SOURCE: 5, IMAGES: 2, IMAGE_TOKENS: 3}
        sizes |= {SAMPLES: SOUND_SAMPLES, FRAMES: 5}
        try:
            return make_feed(self.graphs[component.file].graph.input, sizes, past=past, end=self.end)
        except UnknownAxisError as why:
            raise NotRunError(str(why)) from why


class UnknownAxisError(Exception):
    """An input has an axis that has no size here. The message names both."""


def make_feed(
    inputs: Iterable[Any], sizes: Mapping[str, int], *, past: int, end: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Make inputs without padding.

    Args:
        inputs: A graph's declared inputs.
        sizes: Sizes of the axes that vary, by name.
        past: Tokens before those of the call.
        end: Token that ends a text, if the model has one.

    Raises:
        UnknownAxisError: An axis is not among the sizes.
    """
    random = np.random.default_rng(0)
    feed: dict[str, npt.NDArray[Any]] = {}
    for value in inputs:
        kind = value.type.tensor_type
        shape = []
        for axis in kind.shape.dim:
            if axis.dim_param and axis.dim_param not in sizes:
                raise UnknownAxisError(f"the input {value.name} has an axis {axis.dim_param}")
            shape.append(sizes[axis.dim_param] if axis.dim_param else axis.dim_value)
        if kind.elem_type in _FLOATS:
            scale = 1.0 if value.name in (FEATURES, VALUES) else 0.1
            feed[value.name] = (scale * random.standard_normal(shape)).astype(_FLOATS[kind.elem_type])
        elif kind.elem_type == onnx.TensorProto.BOOL:  # whether there is a cache
            feed[value.name] = np.full(shape, past > 0)
        elif value.name.endswith("mask"):
            feed[value.name] = np.ones(shape, np.int64)
        elif value.name == "position_ids":
            feed[value.name] = np.broadcast_to(np.arange(past, past + shape[-1]), shape).copy()
        elif value.name in TYPES:
            feed[value.name] = np.zeros(shape, np.int64)
        else:
            feed[value.name] = tokens(shape[0], shape[1], end)
    return feed


def tokens(rows: int, count: int, end: int | None = None) -> npt.NDArray[Any]:
    """Make tokens that are the same in each row, (rows, count); the last is the end of the text, which some classifiers look for."""
    row = 3 + np.arange(count) % 5
    if end is not None:
        row = np.where(row == end, 8, row)
        row[-1] = end
    return np.broadcast_to(row, (rows, count)).astype(np.int64)
