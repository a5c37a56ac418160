"""Read and write an ONNX folder without its weights in memory, and update the types in its contract of activations.

Each graph is a ``.onnx`` file, with its data beside it or in it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx_ir.serde import SerdeError

from slipway.errors import ConfigurationError, QuantizationError
from slipway.model.activations import CONTRACT, read_contract
from slipway.model.dtypes import DTYPES, FLOATS, numpy_dtypes
from slipway.model.graphs.pictures import VISION_ENCODER
from slipway.model.graphs.weights import take_weights_in
from slipway_quantize.graphs.left_out import LazyMatrix, LeftOutTensor
from slipway_quantize.pieces import PIECE_WEIGHTS, write_all

DATA_SUFFIX = ".data"
# Runtimes map external data into memory; a tensor that starts at a page boundary needs no copy.
DATA_PAGE = 4096
_SMALL = 64
T = TypeVar("T")
M = TypeVar("M", bound=NDArray[Any] | LazyMatrix)
Shared = dict[tuple[object, ...], Any]
"""Written tensors, by the place of their source and by their form."""
_LARGEST = (1 << 63) - 1
"""Most bytes that numpy and file systems address."""
_FLOATS = {ir.DataType[DTYPES[name].onnx]: dtype for name, dtype in numpy_dtypes(*FLOATS).items()}

_CONTRACT_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16"}


def graph_files(folder: Path) -> list[str]:
    """Return the names of a folder's graphs that read text: one, or two that pass values to each other.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if there is none, ``QUANTIZATION_UNSUPPORTED`` for one graph per layer.
    """
    names = sorted(path.name for path in folder.glob("*.onnx") if path.name != VISION_ENCODER)
    if not names and (folder / "onnx-layered").is_dir():
        raise QuantizationError(
            "the model has one graph per layer, which is not quantized",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="quantize a model that is exported whole, or use the PyTorch levels",
        )
    if not names:
        raise _invalid_error("the folder has no .onnx file", file="model.onnx")
    return names


def load_graph(folder: Path, name: str) -> ir.Model:
    """Load a graph of ``folder``; check that its external tensors lie inside the folder, and leave them on disk.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if the graph cannot be read, or its data is missing, truncated or outside the folder.
    """
    path = folder / name
    try:
        model = ir.load(path)
    except (OSError, ValueError, DecodeError, SerdeError) as error:
        raise _invalid_error(f"{name} cannot be read ({error})", file=name) from error
    for value in model.graph.initializers.values():
        if value.const_value is None:
            raise _invalid_error(f"initializer {value.name!r} has no value", tensor=value.name)
        if isinstance(value.const_value, ir.ExternalTensor):
            _check_external(folder, value.const_value)
        else:
            _check_inline(value.const_value)
    for node in model.graph:
        if not isinstance(node.op_type, str) or not isinstance(node.domain, str):  # bytes that are not UTF-8
            raise _invalid_error(f"node {node.name!r} has the unreadable operator {node.op_type!r}", node=node.name)
    return model


def save_graph(model: ir.Model, folder: Path, name: str) -> None:
    """Write a graph; its external data has already been written.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if the graph that was read cannot be written.
    """
    try:
        ir.save(model, folder / name)
    except SerdeError as error:
        raise _invalid_error(f"the graph cannot be written ({error.__cause__ or error})", file=name) from error


def read_constant(folder: Path, tensor: Any) -> NDArray[Any] | LazyMatrix:
    """Return a constant's values; those of an external tensor are mapped, and read from the file when they are used.

    Values that the graph leaves out are read, in the model's type, when they are made an array.

    onnx_ir refuses to map a file with a second hard link, which an artifact's files have, so this function maps it.
    """
    if isinstance(tensor, LeftOutTensor):
        return tensor.values
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    dtype = _FLOATS.get(tensor.dtype) or np.dtype(tensor.dtype.numpy())
    shape = tuple(int(size) for size in tensor.shape.numpy())
    if 0 in shape:
        return np.empty(shape, dtype)
    with (folder / str(tensor.location)).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mapped, dtype, count=count, offset=tensor.offset or 0).reshape(shape)


def row_chunks(values: M, *, multiple: int = 1) -> Iterator[tuple[int, M]]:
    """Yield ``values`` in pieces along its first axis: (first row, rows). All but the last have a multiple of ``multiple`` rows."""
    if values.ndim == 0 or values.size == 0:
        yield 0, values
        return
    step = max(1, PIECE_WEIGHTS // max(1, values.size // len(values)))
    step = max(multiple, step - step % multiple)
    for start in range(0, len(values), step):
        yield start, cast("M", values[start : start + step])


class DataFile:
    """The external data of a graph that is being written: reserve space, then fill it in any order.

    Args:
        folder: Folder of the new graph.
        name: File name of the graph.
        shared: Tensors that were written for earlier graphs, by their source; those of this graph are added.
    """

    def __init__(self, folder: Path, name: str, shared: Shared) -> None:
        self._folder, self._name, self._shared = folder, name + DATA_SUFFIX, shared
        self._descriptor = os.open(folder / self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def write_once(self, tensor: Any, form: str, write: Callable[[], T]) -> T:
        """Write a tensor that is made from a source in some form; return the written one if a graph of the folder has it."""
        place = tensor_key(tensor)
        if place is None:
            return write()
        key = (*place, form)
        if key not in self._shared:
            self._shared[key] = write()
        made: T = self._shared[key]
        return made

    def reserve(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.ExternalTensor:
        """Reserve space for a tensor; return the constant that refers to it."""
        length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._end += -self._end % (DATA_PAGE if length >= DATA_PAGE else _SMALL)
        tensor = ir.ExternalTensor(
            self._name, self._end, int(length), dtype, shape=ir.Shape(shape), name=name, base_dir=str(self._folder)
        )
        self._end += int(length)
        os.truncate(self._descriptor, self._end)
        return tensor

    def fill(self, tensor: ir.ExternalTensor, values: NDArray[Any], *, row: int = 0) -> None:
        """Write ``values`` as rows of ``tensor``, starting at ``row``.

        Raises:
            OSError: For example ENOSPC.
        """
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        rows = int(tensor.shape.numpy()[0]) if len(tensor.shape) else 1
        assert tensor.offset is not None
        assert tensor.length is not None
        write_all(self._descriptor, data, tensor.offset + row * (tensor.length // max(1, rows)))


def tensor_key(tensor: Any) -> tuple[object, ...] | None:
    """Return a key that is the same for tensors stored in one place; None for a tensor within the graph."""
    if isinstance(tensor, LeftOutTensor):
        return tensor.key
    return (str(tensor.location), tensor.offset or 0) if isinstance(tensor, ir.ExternalTensor) else None


def bind(value: ir.Value, tensor: Any) -> None:
    """Make ``tensor`` the value of the initializer ``value``, with its type and shape."""
    value.const_value = tensor
    value.shape = ir.Shape(tensor.shape)
    value.type = ir.TensorType(tensor.dtype)


def add_initializer(model: ir.Model, tensor: Any) -> ir.Value:
    """Add an initializer to the graph; return the known one if several weights share the tensor.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if the graph has its name already: it gives two tensors one name.
    """
    known = model.graph.initializers.get(tensor.name)
    if known is not None and known.const_value is tensor:
        return known
    if known is not None:
        raise _invalid_error(f"two tensors would be called {tensor.name!r}", tensor=tensor.name)
    value = ir.Value(name=tensor.name)
    bind(value, tensor)
    model.graph.register_initializer(value)
    return value


def copy_external(folder: Path, model: ir.Model, data: DataFile) -> None:
    """Copy to ``data`` every tensor that is still in the old folder's data file."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        external = isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == folder
        if isinstance(tensor, ir.ExternalTensor | LeftOutTensor) and (external or isinstance(tensor, LeftOutTensor)):
            assert value.name is not None
            bind(value, data.write_once(tensor, "copy", partial(_copy, folder, tensor, data, value.name)))


def _copy(folder: Path, tensor: ir.ExternalTensor | LeftOutTensor, data: DataFile, name: str) -> ir.ExternalTensor:
    copy = data.reserve(name, tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()))
    for row, rows in row_chunks(read_constant(folder, tensor)):
        data.fill(copy, np.asarray(rows, np.float32 if isinstance(rows, LazyMatrix) else None), row=row)
    return copy


def _check_external(folder: Path, tensor: ir.ExternalTensor) -> None:
    location = Path(str(tensor.location))
    path = folder / location
    try:
        inside, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
        size = path.stat().st_size if inside and there else 0
    except (OSError, ValueError) as error:  # a name that no file system has
        raise _invalid_error(f"tensor {tensor.name!r} is in a file of an impossible name ({error})") from error
    if location.is_absolute() or not inside:
        raise _invalid_error(f"tensor {tensor.name!r} is outside the folder, in {location}", tensor=tensor.name)
    if not there:
        raise _invalid_error(f"the data file {location} is missing", file=location)
    shape, offset = [int(length) for length in tensor.shape.numpy()], tensor.offset or 0
    try:
        extent = math.prod(length for length in shape if length) * tensor.dtype.itemsize
    except TypeError as error:  # texts, which have no size
        raise _invalid_error(
            f"tensor {tensor.name!r} has a type that no file holds ({error})", tensor=tensor.name
        ) from error
    if min([*shape, offset]) < 0 or max(extent, offset) > _LARGEST:
        raise _invalid_error(
            f"tensor {tensor.name!r} has the impossible shape {shape} at byte {offset}", tensor=tensor.name
        )
    if tensor.length not in {None, tensor.nbytes}:
        raise _invalid_error(
            f"tensor {tensor.name!r} has {tensor.length} bytes, and its shape needs {tensor.nbytes}", tensor=tensor.name
        )
    needed = offset + tensor.nbytes
    if needed > size:
        raise _invalid_error(
            f"{location} is truncated: tensor {tensor.name!r} ends at byte {needed}, the file at {size}", file=location
        )


def _check_inline(tensor: Any) -> None:
    try:
        tensor.numpy()
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise _invalid_error(f"tensor {tensor.name!r} cannot be read ({error})", tensor=tensor.name) from error


def _invalid_error(message: str, **about: object) -> QuantizationError:
    return QuantizationError(message, reason="ONNX_INVALID", remedy="export the ONNX model again", about=about)


def take_data_in(folder: Path) -> None:
    """Move the weights of a folder's graphs from their data files into the graphs, and delete these files.

    Raises:
        QuantizationError: ``ONNX_TOO_LARGE`` if a graph would exceed what a protobuf file can have.
    """
    names = sorted(path.name for path in folder.glob("*.onnx"))
    for name in names:  # a graph may share weights that lie in the file of another one
        model = load_graph(folder, name)
        take_weights_in(model, name, error=QuantizationError)
        save_graph(model, folder, name)
    for name in names:
        (folder / (name + DATA_SUFFIX)).unlink(missing_ok=True)


def restate_contract(folder: Path) -> None:
    """Replace the copied contract of a folder, if it has one; the copy names the types before quantization.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if the contract cannot be read, or names an output that the graph lacks.
    """
    path = folder / CONTRACT
    if not path.is_file():
        return
    try:
        contract = read_contract(path)
    except ConfigurationError as error:
        raise QuantizationError(error.message, reason="ONNX_INVALID", remedy="export the ONNX model again") from error
    dtypes: dict[str, str] = {}
    for graph in contract.graphs:
        outputs = load_graph(folder, _require_file(folder, graph.file)).graph.outputs
        returned = {
            value.name: _CONTRACT_DTYPES.get(value.dtype, "") for value in outputs if value.name and value.dtype
        }
        wrong = [each.name for each in graph.outputs if not returned.get(each.name)]
        if wrong:
            raise QuantizationError(
                f"{CONTRACT} names the output {wrong[0]!r}, which {graph.file} does not return as floats",
                reason="ONNX_INVALID",
                remedy="export the ONNX model again",
                about={"file": CONTRACT, "output": wrong[0]},
            )
        dtypes |= {name: dtype for name, dtype in returned.items() if dtype}
    contract.with_dtypes(dtypes).write(folder)


def _require_file(folder: Path, name: str) -> str:
    """Return the name if the folder has such a graph; a contract may name anything."""
    if name not in {path.name for path in folder.glob("*.onnx")}:
        raise QuantizationError(
            f"{CONTRACT} describes {name!r}, which the folder lacks",
            reason="ONNX_INVALID",
            remedy="export the ONNX model again",
            about={"file": CONTRACT},
        )
    return name
