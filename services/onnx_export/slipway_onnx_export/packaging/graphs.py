"""Read a graph's interface, and write a graph under the names that a runtime expects. Most weights stay in their files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir

from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.packaging.kinds import NotPackagedError

Shape = tuple[int | str, ...]
_PAGE, _SMALL = 4096, 64  # alignment of tensors that runtimes map into memory, and of those below a page
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Interface:
    """Shapes and types of a graph's inputs and outputs by name, and the calls that it takes. An axis that varies has a name."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dtypes: Mapping[str, ir.DataType]
    promise: Promise = EVERY_CALL


def load_graph(folder: Path, name: str) -> ir.Model:
    """Load a graph that a stage has just written.

    Raises:
        NotPackagedError: The folder has none of this name.
    """
    if not (folder / name).is_file():
        raise NotPackagedError(f"its folder has no {name}")
    return ir.load(folder / name)


def read_interface(folder: Path, name: str) -> Interface:
    """Read the interface of a graph that a stage has just written.

    Raises:
        NotPackagedError: The folder has none of this name.
    """
    model = load_graph(folder, name)
    graph = model.graph
    return Interface(
        inputs={str(value.name): _shape(value) for value in graph.inputs},
        outputs={str(value.name): _shape(value) for value in graph.outputs},
        dtypes={str(value.name): value.dtype for value in (*graph.inputs, *graph.outputs) if value.dtype is not None},
        promise=Promise.of(model.metadata_props),
    )


def _shape(value: ir.Value) -> Shape:
    return tuple(size if isinstance(size, int) else str(size.value or "") for size in value.shape or ())


def rename_axes(model: ir.Model, names: Mapping[str, str]) -> None:
    """Give the axes of all inputs and outputs new names; ``names`` has the new name by the old one."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        sizes = (
            size if isinstance(size, int) else names.get(str(size.value), size.value) for size in value.shape or ()
        )
        value.shape = ir.Shape(list(sizes))


def save_copy(model: ir.Model, target: Path, *, own: str) -> int:
    """Write a graph with its data beside it, in ``NAME.onnx_data``, ``NAME.onnx_data_1``, ….

    The graph's own data file gets a second name, so it takes no more space. Weights in other graphs' files are copied to a new file.

    Args:
        model: The graph; its external tensors are where it was loaded from. They are bound to the new files.
        target: The copy.
        own: Name of the graph's own data file.

    Returns:
        The number of data files.
    """
    outside = [
        (value, value.const_value) for value in _initializers(model) if isinstance(value.const_value, ir.ExternalTensor)
    ]
    kept = [(value, tensor) for value, tensor in outside if str(tensor.location) == own]
    strange = [(value, tensor) for value, tensor in outside if str(tensor.location) != own]
    names = iter((f"{target.name}_data", f"{target.name}_data_1"))
    count = 0
    if kept:
        name, count = next(names), count + 1
        link(Path(kept[0][1].base_dir) / own, target.parent / name)
        for value, tensor in kept:
            _bind(value, tensor, name, int(tensor.offset or 0), target.parent)
    if strange:
        name, count = next(names), count + 1
        with (target.parent / name).open("wb") as file:
            copied: dict[tuple[str, int, int], int] = {}
            for value, tensor in strange:
                place = str(tensor.location), int(tensor.offset or 0), int(tensor.nbytes)
                if place not in copied:
                    copied[place] = _append(file, tensor)
                _bind(value, tensor, name, copied[place], target.parent)
    ir.save(model, target)
    return count


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.initializers.values()


def _bind(value: ir.Value, tensor: Any, name: str, offset: int, folder: Path) -> None:
    value.const_value = ir.ExternalTensor(
        name, offset, int(tensor.nbytes), tensor.dtype, shape=tensor.shape, name=value.name or "", base_dir=str(folder)
    )


def _append(file: BinaryIO, tensor: Any) -> int:
    """Copy a tensor's bytes to the end of a file; return where they begin."""
    left = int(tensor.nbytes)
    file.seek(-file.tell() % (_PAGE if left >= _PAGE else _SMALL), os.SEEK_CUR)
    start = file.tell()
    with (Path(tensor.base_dir) / str(tensor.location)).open("rb") as source:
        source.seek(int(tensor.offset or 0))
        while left > 0:
            left -= file.write(source.read(min(left, _CHUNK)))
    return start


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it."""
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
