"""Read a graph that may be hostile: regular files only, no data outside its folder, no declared size without its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError

from slipway.errors import ONNXExportError
from slipway.files.regular_file import check_regular, read_regular
from slipway.texts import quoted

LARGEST_GRAPH = (1 << 31) - 1
"""Most bytes of a file: protobuf reads no more."""
_MOST_DEPTH = 8


def read_graph(path: Path) -> onnx.ModelProto:
    """Read a graph without its external data, which is only checked.

    Raises:
        ONNXExportError: ``ONNX_INVALID``.
    """
    try:
        model = onnx.ModelProto.FromString(read_regular(path, largest=LARGEST_GRAPH))
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror or error}") from error
    except (DecodeError, ValueError) as error:
        raise _invalid(path, "is not an ONNX graph") from error
    except MemoryError as error:
        raise _invalid(path, "needs more memory than there is, only to be read") from error
    if not model.graph.node and not model.graph.output:
        raise _invalid(path, "is not an ONNX graph: it has no nodes and no outputs")
    for tensor in _tensors(model.graph, path, 0):
        _check_tensor(tensor, path)
    for function in model.functions:
        for node in function.node:
            for tensor in _of_node(node, path, 0):
                _check_tensor(tensor, path)
    return model


def _tensors(graph: onnx.GraphProto, path: Path, depth: int) -> Iterator[onnx.TensorProto]:
    if depth > _MOST_DEPTH:
        raise _invalid(path, f"has graphs within graphs, more than {_MOST_DEPTH} deep")
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _of_node(node, path, depth)


def _of_node(node: onnx.NodeProto, path: Path, depth: int) -> Iterator[onnx.TensorProto]:
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
        raise _invalid(path, f"has a tensor {quoted(tensor.name)} of the shape {list(tensor.dims)[:8]}")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", ""))
    if not location.parts or location.is_absolute() or ".." in location.parts or "\0" in str(location):
        raise _invalid(path, f"has data of {quoted(tensor.name)} outside its folder, in {quoted(str(location))}")
    data = path.parent / location
    try:
        if not data.resolve().is_relative_to(path.parent.resolve()):
            raise _invalid(
                path, f"has data of {quoted(tensor.name)} behind a link out of its folder, {quoted(str(location))}"
            )
        check_regular(data)
        size = data.stat().st_size
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except (OSError, ValueError) as error:
        raise _invalid(
            path, f"has data of {quoted(tensor.name)} that cannot be read from {quoted(str(location))}: {error}"
        ) from error
    if offset < 0 or length < 0 or offset + length > size or math.prod(tensor.dims) > 8 * max(length, 1):
        raise _invalid(path, f"declares more data of {quoted(tensor.name)} than {quoted(str(location))} has")


def _invalid(path: Path, fault: str) -> ONNXExportError:
    return ONNXExportError(
        f"{path.name} {fault}",
        reason="ONNX_INVALID",
        remedy="give a complete ONNX file or export",
        about={"file": path.name},
    )
