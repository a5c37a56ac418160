"""Read a graph that may be hostile, and run it once on dummy input, unless it asks for absurd sizes.

Only regular files are read, no data outside the graph's folder, and no declared size without its bytes.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError, EncodeError

from slipway.errors import ONNXExportError
from slipway.files.regular_file import check_regular, read_regular
from slipway.machine.processes import session_options
from slipway.model.activations import GraphReport, InspectedValue
from slipway.proof.onnx_errors import ORT_ERRORS
from slipway.sizes import format_size
from slipway.texts import one_line, printable, quoted

_SIZES = {"batch": 1, "sequence": 3, "past_sequence": 2, "total_sequence": 5, "encoder_sequence": 4}
"""Sizes of the axes by the names of our own exports; total_sequence is past_sequence + sequence."""
_PARTS = (("total", 5), ("past", 2), ("encoder", 4), ("sequence", 3), ("length", 3))
"""Sizes of axes of other exporters, by a part of their names; the first that fits."""
LARGEST_VALUE = 1 << 28
"""Most bytes of one value, and of all inputs together."""
_MOST_PORTS = 20_000
_MOST_PROPERTIES, _LONGEST_PROPERTY = 32, 500

_DTYPES = {"float": "float32", "double": "float64"}
_NUMPY = {
    name: name
    for name in (
        *("float32", "float64", "float16", "int64", "int32", "int16", "int8", "bool"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
}

LARGEST_GRAPH = (1 << 31) - 1
"""Most bytes of a file: protobuf reads no more."""
_MOST_DEPTH = 8


def limit_memory(most: int) -> None:
    """Limit the memory that this process may allocate from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # it already uses more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def run_once(model: onnx.ModelProto, path: Path, *, threads: int) -> GraphReport:
    """Describe a graph's inputs and outputs, and run it once if its sizes are sane."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    outputs = list(model.graph.output)
    axes: dict[str, int] = {}
    given = tuple(_describe(value, axes) for value in inputs[:_MOST_PORTS])
    named = tuple(_describe(value, axes) for value in outputs[:_MOST_PORTS])
    report = GraphReport(file=path.name, metadata=_metadata(model), inputs=given, outputs=named)
    why = _describe_excess(model, inputs, given, axes)
    if why:
        return report.model_copy(update={"not_run": why})
    try:
        session = onnxruntime.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
        feed = {value.name: _dummy(value, axes) for value in given}
        arrays = session.run([value.name for value in named], feed)
    except (*ORT_ERRORS, MemoryError, RuntimeError, ValueError) as error:
        # A legal graph may need other inputs than dummies: this says nothing about the contract.
        return report.model_copy(
            update={"not_run": f"onnxruntime cannot run it: {one_line(printable(str(error)))[:500]}"}
        )
    done = tuple(
        value.model_copy(update={"found": tuple(array.shape), "found_dtype": str(array.dtype)})
        if isinstance(array, np.ndarray)
        else value
        for value, array in zip(named, arrays, strict=True)
    )
    return report.model_copy(update={"outputs": done, "axes": axes, "ran": True})


def _metadata(model: onnx.ModelProto) -> dict[str, str]:
    shown = (
        [one_line(text)[:_LONGEST_PROPERTY] for text in (entry.key, entry.value)]
        for entry in model.metadata_props[:_MOST_PROPERTIES]
    )
    return {key: value for key, value in shown if key}


def _describe(value: onnx.ValueInfoProto, axes: dict[str, int]) -> InspectedValue:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return InspectedValue(name=value.name, dtype=value.type.WhichOneof("value") or "unknown", shape=())
    with contextlib.suppress(ValueError):
        known = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        shape: list[str | int] = []
        for index, axis in enumerate(kind.shape.dim):
            if axis.WhichOneof("value") == "dim_value":
                shape.append(axis.dim_value)
            else:
                shape.append(axis.dim_param or f"{value.name}:{index}")
        for name in (each for each in shape if isinstance(each, str)):
            axes.setdefault(name, _size(name))
        return InspectedValue(name=value.name, dtype=_DTYPES.get(known, known), shape=tuple(shape))
    return InspectedValue(name=value.name, dtype="unknown", shape=())


def _size(axis: str) -> int:
    parts = [part.strip() for part in axis.split("+")]
    if len(parts) > 1:
        return sum(int(part) if part.isdecimal() and len(part) < 4 else _size(part) for part in parts[:8])
    if axis in _SIZES:
        return _SIZES[axis]
    return next((size for part, size in _PARTS if part in axis.lower()), 1)


def _shape(value: InspectedValue, axes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in value.shape)


def _describe_excess(
    model: onnx.ModelProto, inputs: Iterable[Any], given: tuple[InspectedValue, ...], axes: Mapping[str, int]
) -> str:
    """Describe the input or value that prevents a run, by its type or size; empty if none is known."""
    total = 0
    for value in given:
        if value.dtype not in _NUMPY:
            return f"its input {quoted(value.name)} has the type {value.dtype}, for which there is no dummy value"
        shape = _shape(value, axes)
        total += math.prod(shape) * np.dtype(_NUMPY[value.dtype]).itemsize
        if min(shape, default=0) < 0 or total > LARGEST_VALUE:
            return f"its input {quoted(value.name)} of the shape {list(shape)} would need {_bytes(total)}"
    return _describe_inner_excess(model, inputs, axes)


def _describe_inner_excess(model: onnx.ModelProto, inputs: Iterable[Any], axes: Mapping[str, int]) -> str:
    """Infer the sizes of all values for the dummy input, and describe one that is too large; empty if none is known.

    The inference ends at an operator that ONNX does not know.
    """
    for value in inputs:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in axes:
                axis.dim_value = axes[axis.dim_param]
    try:
        known = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, EncodeError, ValueError, MemoryError, RuntimeError):
        return ""  # the runtime's own checks decide; the process's memory is limited
    for value in (*known.graph.value_info, *known.graph.output):
        count = math.prod(max(axis.dim_value, 0) or 1 for axis in value.type.tensor_type.shape.dim)
        if count > LARGEST_VALUE:
            return f"its value {quoted(value.name)} would have {count} elements"
    return ""


def _bytes(count: int) -> str:
    return format_size(count) if count < 1 << 62 else "more bytes than any machine has"


def _dummy(value: InspectedValue, axes: Mapping[str, int]) -> Any:
    """Return zeros, and ones for a mask."""
    make = np.ones if value.name.endswith("mask") else np.zeros
    return make(_shape(value, axes), dtype=_NUMPY[value.dtype])


def read_graph(path: Path) -> onnx.ModelProto:
    """Read a graph without its external data, which is only checked.

    Raises:
        ONNXExportError: ``ONNX_INVALID``.
    """
    try:
        model = onnx.ModelProto.FromString(read_regular(path, largest=LARGEST_GRAPH))
    except OSError as error:
        raise _invalid_error(path, f"cannot be read: {error.strerror or error}") from error
    except (DecodeError, ValueError) as error:
        raise _invalid_error(path, "is not an ONNX graph") from error
    except MemoryError as error:
        raise _invalid_error(path, "needs more memory than there is, only to be read") from error
    if not model.graph.node and not model.graph.output:
        raise _invalid_error(path, "is not an ONNX graph: it has no nodes and no outputs")
    for tensor in _tensors(model.graph, path, 0):
        _check_tensor(tensor, path)
    for function in model.functions:
        for node in function.node:
            for tensor in _tensors_of_node(node, path, 0):
                _check_tensor(tensor, path)
    return model


def _tensors(graph: onnx.GraphProto, path: Path, depth: int) -> Iterator[onnx.TensorProto]:
    if depth > _MOST_DEPTH:
        raise _invalid_error(path, f"has graphs within graphs, more than {_MOST_DEPTH} deep")
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of_node(node, path, depth)


def _tensors_of_node(node: onnx.NodeProto, path: Path, depth: int) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            yield from _tensors(attribute.g, path, depth + 1)
        for graph in attribute.graphs:
            yield from _tensors(graph, path, depth + 1)


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Check that the data of an external tensor is there, in the folder."""
    if any(size < 0 for size in tensor.dims):
        raise _invalid_error(path, f"has a tensor {quoted(tensor.name)} of the shape {list(tensor.dims)[:8]}")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", ""))
    if not location.parts or location.is_absolute() or ".." in location.parts or "\0" in str(location):
        raise _invalid_error(path, f"has data of {quoted(tensor.name)} outside its folder, in {quoted(str(location))}")
    data = path.parent / location
    try:
        if not data.resolve().is_relative_to(path.parent.resolve()):
            raise _invalid_error(
                path, f"has data of {quoted(tensor.name)} behind a link out of its folder, {quoted(str(location))}"
            )
        check_regular(data)
        size = data.stat().st_size
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except (OSError, ValueError) as error:
        raise _invalid_error(
            path, f"has data of {quoted(tensor.name)} that cannot be read from {quoted(str(location))}: {error}"
        ) from error
    if offset < 0 or length < 0 or offset + length > size or math.prod(tensor.dims) > 8 * max(length, 1):
        raise _invalid_error(path, f"declares more data of {quoted(tensor.name)} than {quoted(str(location))} has")


def _invalid_error(path: Path, fault: str) -> ONNXExportError:
    return ONNXExportError(
        f"{path.name} {fault}",
        reason="ONNX_INVALID",
        remedy="give a complete ONNX file or export",
        about={"file": path.name},
    )
