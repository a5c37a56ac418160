"""What the checks of an export look at: its written graphs, read without their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from slipway_onnx_export.interface import BATCH, FEATURES, PAST, SEQUENCE, SOURCE, TOTAL, Component

TINY_BYTES, TINY_NODES = 4 << 20, 3000
"""Sizes up to which graphs are run by the checks: then it takes a fraction of a second."""


class FaultError(Exception):
    """A written graph fails a check. The message says how."""


class NotRunError(Exception):
    """A check cannot be made of this model. The message says why."""


@dataclass(frozen=True)
class Written:
    """A written folder, and what was asked for.

    Attributes:
        folder: The folder.
        components: Interfaces of its graphs.
        opset: The opset that was asked for.
        end: Token that ends a text, if the model has one.
        metadata: Properties that the file of every graph has.
        left_out: Weights that are inputs of a graph, by its file.
    """

    folder: Path
    components: tuple[Component, ...]
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
        found = {}
        for component in self.components:
            try:
                found[component.file] = onnx.load(self.folder / component.file, load_external_data=False)
            except Exception as error:  # protobuf's own errors have no common class
                raise FaultError(f"{component.file} cannot be read: {type(error).__name__}: {error}") from error
        return found

    def stored(self) -> Iterator[tuple[str, Any]]:
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

    def feed(self, component: Component, *, past: int, new: int) -> dict[str, npt.NDArray[Any]]:
        """Make inputs of a graph without padding.

        Raises:
            NotRunError: If an input has an axis that is not known here.
        """
        rows = 1 if component.promise.shared_buffer and past else 2
        sizes = {BATCH: rows, SEQUENCE: new, PAST: past, TOTAL: past + new, SOURCE: 5}
        random = np.random.default_rng(0)
        feed: dict[str, npt.NDArray[Any]] = {}
        for value in self.graphs[component.file].graph.input:
            kind = value.type.tensor_type
            shape = []
            for axis in kind.shape.dim:
                if axis.dim_param and axis.dim_param not in sizes:
                    raise NotRunError(f"the input {value.name} has an axis {axis.dim_param}")
                shape.append(sizes[axis.dim_param] if axis.dim_param else axis.dim_value)
            if kind.elem_type == onnx.TensorProto.FLOAT:
                scale = 1.0 if value.name == FEATURES else 0.1
                feed[value.name] = (scale * random.standard_normal(shape)).astype(np.float32)
            elif kind.elem_type == onnx.TensorProto.BOOL:
                feed[value.name] = np.zeros(shape, np.bool_)
            elif value.name.endswith("mask"):
                feed[value.name] = np.ones(shape, np.int64)
            elif value.name == "position_ids":
                feed[value.name] = np.broadcast_to(np.arange(past, past + shape[-1]), shape).copy()
            elif value.name == "token_type_ids":
                feed[value.name] = np.zeros(shape, np.int64)
            else:
                feed[value.name] = self._tokens(shape)
        return feed

    def _tokens(self, shape: list[int]) -> npt.NDArray[Any]:
        """Make tokens that are the same in each row; the last is the end of the text, which some classifiers look for."""
        row = 3 + np.arange(shape[-1]) % 5
        if self.end is not None:
            row = np.where(row == self.end, 8, row)
            row[-1] = self.end
        return np.broadcast_to(row, shape).astype(np.int64)
