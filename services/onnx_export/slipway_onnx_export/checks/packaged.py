"""Check the graphs of a package like those of the folder that it is made from, and compare their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from slipway.model.graphs.promise import Promise
from slipway.sizes import format_size
from slipway_onnx_export.checks.agreement import check_agreement
from slipway_onnx_export.checks.folder import CHECKS, first_line, read_names
from slipway_onnx_export.checks.written import FaultError, NotRunError, WrittenFolder

_CHECKS = ("opset", "paths", "valid", "shapes", "interface", "stored once", "metadata", "loads")
"""The checks that need no more than a graph; comparing the results replaces the others."""

PARITY = "parity"


@dataclass(frozen=True, slots=True)
class _Value:
    """An input or output as a graph declares it; see :class:`slipway_onnx_export.checks.written.PortLike`."""

    name: str
    shape: Sequence[str | int | None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph as it declares itself; see :class:`slipway_onnx_export.checks.written.GraphLike`."""

    file: str
    inputs: Sequence[_Value]
    outputs: Sequence[_Value]
    unread: Collection[str]
    promise: Promise


def check_package(files: Sequence[Path], folder: Path, *, end: int | None, max_memory_bytes: int) -> dict[str, str]:
    """Run every check of a package's graphs.

    Args:
        files: The graphs.
        folder: The folder that the package is made from; its graphs were checked before.
        end: Token that ends a text, if the model has one.
        max_memory_bytes: Memory of the attempt; a comparison whose weights exceed it is not run.

    Returns:
        ``passed`` or ``not run: reason``, by the check's name.

    Raises:
        FaultError: A check fails. The message names it.
    """
    origin = {path.name: _load(path) for path in sorted(folder.glob("*.onnx"))}
    unread = {name for model in origin.values() for name in _unread_inputs(model)}
    opset = max(_opset_of(model) for model in origin.values())
    results: dict[str, str] = {}
    for path in files:  # one by one: some runtimes want each graph's weights in files of its own
        component = _describe(path.name, _load(path), unread)
        written = WrittenFolder(path.parent, (component,), opset, metadata=_shared_metadata(origin.values()))
        for name in _CHECKS:
            try:
                (_check_validity if name == "valid" else CHECKS[name])(written)
            except FaultError as fault:
                raise FaultError(f"check {name!r}: {fault}") from fault
            results[name] = "passed"
    try:
        if not all(any(_is_copy(path, folder / name, other) for name, other in origin.items()) for path in files):
            _require_memory(folder, max_memory_bytes)
            check_agreement(files, [folder / name for name in origin], end=end)
        results[PARITY] = "passed"
    except NotRunError as why:
        results[PARITY] = f"not run: {why}"
    except FaultError as fault:
        raise FaultError(f"check {PARITY!r}: {fault}") from fault
    return results


def _check_validity(written: WrittenFolder) -> None:
    """Check graphs as if their weights were inputs: onnx's checker refuses data files that have a second name."""
    for name, model in written.graphs.items():
        alone = onnx.ModelProto()
        alone.CopyFrom(model)
        kept = [tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
        del alone.graph.initializer[:]
        alone.graph.initializer.extend(kept)
        alone.graph.input.extend(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        )
        try:
            onnx.checker.check_model(alone)
        except onnx.checker.ValidationError as error:
            raise FaultError(f"{name} is not valid: {first_line(error)}") from error


def _require_memory(folder: Path, most: int) -> None:
    nbytes = sum(path.stat().st_size for pattern in ("*.onnx", "*.data") for path in folder.glob(pattern))
    if nbytes > most:
        raise NotRunError(f"{format_size(nbytes)} of weights exceed the attempt's {format_size(most)}")


def _is_copy(path: Path, other_path: Path, other: Any) -> bool:
    """Return whether a graph has another's nodes and the same stored weights, so that nothing is left to compare."""
    model = _load(path)
    same = [*model.graph.node] == [*other.graph.node] and [*model.functions] == [*other.functions]
    return same and _weights(model, path.parent) == _weights(other, other_path.parent)


def _weights(model: Any, folder: Path) -> dict[str, object]:
    """Return where each weight lies: device and number of the file, and its place there; or its bytes."""
    places: dict[str, object] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            places[tensor.name] = tensor.SerializeToString(deterministic=True)
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = (folder / entries["location"]).stat()
        place = file.st_dev, file.st_ino, entries.get("offset", "0"), entries.get("length")
        places[tensor.name] = (*place, tensor.data_type, *tensor.dims)
    return places


def _load(path: Path) -> Any:
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own errors have no common class
        raise FaultError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


def _describe(name: str, model: Any, unread: Collection[str]) -> _Graph:
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [_Value(value.name, ()) for value in model.graph.input if value.name not in stored]
    outputs = [_Value(value.name, ()) for value in model.graph.output]
    return _Graph(name, inputs, outputs, unread, Promise.of(_metadata_of(model)))


def _unread_inputs(model: Any) -> set[str]:
    return {value.name for value in model.graph.input} - read_names(model.graph)


def _opset_of(model: Any) -> int:
    return max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def _metadata_of(model: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _shared_metadata(models: Collection[Any]) -> dict[str, str]:
    """Return the properties that all graphs have."""
    first, *others = [set(_metadata_of(model).items()) for model in models]
    return dict(first.intersection(*others))
