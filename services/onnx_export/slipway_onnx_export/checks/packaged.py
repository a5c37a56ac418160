"""Check the graphs of a package like those of its folder, and compare the results of both on the same inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from slipway.model.graphs.calls import Promise
from slipway.proof.comparison import difference
from slipway.proof.onnx_errors import translate_ort_errors
from slipway.sizes import format_size
from slipway_onnx_export.checks.folder import CHECKS, first_line, open_unoptimized, read_names
from slipway_onnx_export.checks.written import SOUND_SAMPLES, FaultError, NotRunError, WrittenFolder, tokens
from slipway_onnx_export.names import (
    BRANCH,
    CACHE,
    ENCODED,
    FEATURES,
    HIDDEN,
    IDS,
    MASK,
    POSITIONS,
    PRESENT,
    SOURCE_MASK,
    TYPES,
    VALUES,
    usual_name,
)

_CHECKS = ("opset", "paths", "valid", "shapes", "interface", "stored once", "metadata", "loads")
"""The checks that need no more than a graph; comparing the results replaces the others."""

PARITY = "parity"

Array = npt.NDArray[Any]
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
_TOLERANCES = {np.dtype(np.float16): 1e-2}
_TOLERANCE = 1e-3
_ROWS, _NEW, _SOURCE = 2, (3, 1), 5
"""Rows, tokens of the calls, and tokens of a source, where a graph does not fix them."""


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


class _RunGraph:
    """A graph that picks its inputs from all known arrays and casts them to its types."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._session = open_unoptimized(path)
        self.inputs = {usual_name(value.name): value for value in self._session.get_inputs()}
        self.outputs = [usual_name(value.name) for value in self._session.get_outputs()]

    @property
    def cached(self) -> bool:
        return any(name.startswith(CACHE) for name in self.inputs)

    def run(self, known: Mapping[str, Array]) -> dict[str, Array]:
        lacking = sorted(self.inputs.keys() - known.keys())
        if lacking:
            raise NotRunError(f"nothing is known of the input {lacking[0]} of {self.path.name}")
        feed: dict[str, Array] = {
            value.name: known[name].astype(_DTYPES[value.type]) for name, value in self.inputs.items()
        }
        what = f"onnxruntime cannot run {self.path.name}"
        with translate_ort_errors(lambda error: FaultError(f"{what}: {first_line(error)}")):
            return dict(zip(self.outputs, self._session.run(None, feed), strict=True))


def check_agreement(files: Sequence[Path], origin: Sequence[Path], *, end: int | None = None) -> None:
    """Compare the results of a package's graphs with the folder's: of the encoder, a first call, and a call with a cache.

    Args:
        files: The package's graphs.
        origin: The folder's.
        end: Token that ends a text, if the model has one.

    Raises:
        FaultError: They differ, or a graph does not run.
        NotRunError: A graph has an input that is not known here.
    """
    folder = [_RunGraph(path) for path in origin]
    known = _make_inputs(folder, end)
    wanted = list(_run_calls(folder, known))
    del folder
    for result, (place, reference) in zip(_run_calls([_RunGraph(path) for path in files], known), wanted, strict=True):
        file, results = result
        for name in [name for name in results if name in reference]:
            tolerance = max(_TOLERANCES.get(each.dtype, _TOLERANCE) for each in (results[name], reference[name]))
            off = difference(results[name], reference[name], overflow=True)
            if off.share > tolerance:
                allowed = tolerance * off.scale
                raise FaultError(
                    f"{name!r} of {file} differs from that of {place} by {off.largest:.3g}, not {allowed:.3g}"
                )
        if not results.keys() & reference.keys():
            raise FaultError(f"{file} returns nothing that {place} returns")


def _run_calls(graphs: Sequence[_RunGraph], known: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array]]]:
    """Run the encoder, if there is one, and the calls of the other graph; yield the file and results of each."""
    state = dict(known)
    encoder = next((graph for graph in graphs if HIDDEN in graph.outputs and len(graphs) > 1), None)
    decoders = [graph for graph in graphs if graph is not encoder]
    crossed: dict[str, Array] = {}  # a package may return it with every call
    if encoder is not None:
        results = encoder.run(state)
        yield encoder.path.name, results
        crossed = {name: each for name, each in results.items() if name.startswith(PRESENT)}
        state |= {ENCODED: results[HIDDEN], SOURCE_MASK: state.get(MASK, np.zeros(0))} | _past_of(results)
    grows = any(graph.cached for graph in decoders) and f"{IDS}.1" in known
    for step in range(1 + grows):
        graph = next((graph for graph in decoders if graph.cached == bool(step)), decoders[0])
        whole = state | {
            name.removesuffix(f".{step}"): value for name, value in state.items() if name[-2:] == f".{step}"
        }
        results = graph.run(whole | {BRANCH: np.array([step > 0])})
        yield graph.path.name, crossed | results
        state |= _past_of(results)


def _past_of(results: Mapping[str, Array]) -> dict[str, Array]:
    return {name.replace(PRESENT, CACHE, 1): each for name, each in results.items() if name.startswith(PRESENT)}


def _make_inputs(graphs: Sequence[_RunGraph], end: int | None) -> dict[str, Array]:
    """Make the inputs of a folder's graphs. Those that differ by call end in ``.0`` for the first and ``.1`` for the second."""
    random = np.random.default_rng(0)
    declared = {name: value.shape for graph in graphs for name, value in graph.inputs.items()}
    pair = len(graphs) > 1
    decoder = next((graph for graph in graphs if HIDDEN not in graph.outputs), graphs[0])
    rows, new = (_size(size, usual) for size, usual in zip(decoder.inputs[IDS].shape, (_ROWS, _NEW[0]), strict=True))
    caches = {name: shape for name, shape in declared.items() if name.startswith(CACHE)}
    growing = (shape for name, shape in caches.items() if name.endswith(".key") and ".encoder." not in name)
    length = next((_size(shape[2], 0) for shape in growing), 0)
    made: dict[str, Array] = {TYPES: np.zeros((rows, new), np.int64)}
    for name, (_, *axes) in caches.items():
        made[name] = 0.1 * random.standard_normal((rows, *(_size(axis, 0) for axis in axes)))
    if FEATURES in declared:
        made[FEATURES] = random.standard_normal([rows, *declared[FEATURES][1:]])
    if VALUES in declared:
        made[VALUES] = random.standard_normal((rows, SOUND_SAMPLES))
    if pair:
        source = _size(
            next(iter(graph for graph in graphs if graph is not decoder)).inputs.get(IDS, decoder.inputs[IDS]).shape[1],
            _SOURCE,
        )
        source = SOUND_SAMPLES if VALUES in declared else source
        made[MASK] = np.ones((rows, source), np.int64)
        made[MASK][-1, source // 2 + 1 :] = 0
        made[IDS] = tokens(rows, source, end)
    for step, count in enumerate((new,) if length or isinstance(decoder.inputs[IDS].shape[1], int) else _NEW):
        past = length + sum(_NEW[:step])
        made[f"{IDS}.{step}"] = tokens(rows, count, end)
        made[f"{POSITIONS}.{step}"] = np.broadcast_to(np.arange(past, past + count), (rows, count))
        if not pair:
            made[f"{MASK}.{step}"] = np.ones((rows, past + count), np.int64)
    return made


def _size(declared: Any, usual: int) -> int:
    return declared if isinstance(declared, int) else usual
