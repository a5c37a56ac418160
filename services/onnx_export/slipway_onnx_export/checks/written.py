"""What the checks of an export look at: its written graphs, read without their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import onnx

from slipway.model.graphs.promise import Promise
from slipway_onnx_export.checks.feeds import UnknownAxisError, make_feed
from slipway_onnx_export.names import BATCH, CACHE, PAST, SEQUENCE, SOURCE, TOTAL

TINY_BYTES, TINY_NODES = 4 << 20, 3000
"""Sizes up to which graphs are run by the checks: then it takes a fraction of a second."""


class FaultError(Exception):
    """A written graph fails a check. The message says how."""


class NotRunError(Exception):
    """A check cannot be made of this model. The message says why."""


class Named(Protocol):
    """An input or an output."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def shape(self) -> Sequence[str | int | None]:
        """Return its axes."""
        ...


class Described(Protocol):
    """A graph's file and interface, as :class:`slipway_onnx_export.interface.Component` has them."""

    @property
    def file(self) -> str:
        """Return its file name."""
        ...

    @property
    def inputs(self) -> Sequence[Named]:
        """Return its inputs."""
        ...

    @property
    def outputs(self) -> Sequence[Named]:
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
    components: tuple[Described, ...]
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

    def feed(self, component: Described, *, past: int, new: int) -> dict[str, npt.NDArray[Any]]:
        """Make inputs of a graph without padding.

        Raises:
            NotRunError: If an input has an axis that is not known here.
        """
        if not any(port.name.startswith(CACHE) for port in component.inputs):
            past = 0  # each call reads the text from its beginning
        rows = 1 if component.promise.shared_buffer and past else 2
        sizes = {BATCH: rows, SEQUENCE: new, PAST: past, TOTAL: past + new, SOURCE: 5}
        try:
            return make_feed(self.graphs[component.file].graph.input, sizes, past=past, end=self.end)
        except UnknownAxisError as why:
            raise NotRunError(str(why)) from why
