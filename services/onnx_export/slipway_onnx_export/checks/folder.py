"""Check a written folder: each check passes, fails by name with a reason, or is *not run* by name with a reason."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import onnxruntime
from onnx.reference import ReferenceEvaluator

from slipway.errors import ONNXExportError
from slipway_onnx_export.checks.written import Described, FaultError, NotRunError, Written
from slipway_onnx_export.names import PAST, PRESENT
from slipway_onnx_export.parity.ort_errors import ort_failures
from slipway_onnx_export.writing.weights import INLINE_BYTES

_TOLERANCE = 1e-3
NOT_TINY = "the graphs are too large or lack their weights"


def load(written: Written) -> None:
    """Each graph loads."""
    for component in written.components:
        open_unoptimized(written.folder / component.file)


def grow_caches(written: Written) -> None:
    """No cache that a graph returns has length zero, neither from an empty past nor from a longer one."""
    for component in written.components:
        for value in written.graphs[component.file].graph.output:
            fixed = [axis.dim_value for axis in value.type.tensor_type.shape.dim if axis.HasField("dim_value")]
            if 0 in fixed:
                raise FaultError(f"{component.file} returns {value.name!r} of length zero")
    if not written.tiny:
        raise NotRunError(NOT_TINY + "; the comparison with PyTorch or the validation runs them")
    for component in written.components:
        for past in (0, 4):
            for name, array in _run(written, component, past=past).items():
                if name.startswith(PRESENT) and 0 in array.shape:
                    raise FaultError(f"{component.file} returns {name!r} of length zero after {past} tokens")


def agree_with_reference(written: Written) -> None:
    """ONNX's own reference computes what ONNX Runtime does."""
    if not written.tiny:
        raise NotRunError(NOT_TINY)
    for component in written.components:
        past = 2 if any(PAST in port.shape for port in component.inputs) else 0
        found, feed = _run(written, component, past=past), written.feed(component, past=past, new=3)
        try:
            reference = ReferenceEvaluator(onnx.load(written.folder / component.file))
            wanted = reference.run(list(found), feed)
        except Exception as error:  # the reference lets any exception of an operator's Python code through
            raise NotRunError(f"the reference cannot run {component.file}: {first_line(error)}") from error
        for (name, array), other in zip(found.items(), wanted, strict=True):
            scale = max(1.0, float(np.abs(other).max(initial=0)))
            far = (
                float(np.abs(array.astype(np.float64) - other).max(initial=0))
                if array.shape == other.shape
                else float("inf")
            )
            if not far <= _TOLERANCE * scale:
                raise FaultError(f"{name!r} of {component.file} differs from ONNX's reference by {far:.3g}")


def open_unoptimized(path: Path) -> Any:
    """Load a graph with one thread. Nothing is optimized or packed, so its weights are mapped, and read only where it runs.

    Raises:
        FaultError: ONNX Runtime cannot load it.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    what = f"onnxruntime {onnxruntime.__version__} cannot load {path.name}"
    with ort_failures(lambda error: FaultError(f"{what}: {first_line(error)}")):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(written: Written, component: Described, *, past: int) -> dict[str, Any]:
    session = open_unoptimized(written.folder / component.file)
    names = [value.name for value in session.get_outputs()]
    with ort_failures(lambda error: FaultError(f"onnxruntime cannot run {component.file}: {first_line(error)}")):
        return dict(zip(names, session.run(names, written.feed(component, past=past, new=3)), strict=True))


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


_SAMPLE = 4096
_REASONS = {"opset": "OPSET_UNSUPPORTED", "reference": "EXPORT_PARITY_FAILED"}
"""Reasons of checks; the others fail as the engine's failure."""


def check_folder(written: Written, *, engine: str, checks: Mapping[str, Check] | None = None) -> dict[str, str]:
    """Make every check of a written folder, in order.

    Args:
        written: The folder.
        engine: The engine that made its graphs, for the error's ``about``.
        checks: The checks; all by default.

    Returns:
        ``passed`` or ``not run: reason``, by the check's name.

    Raises:
        ONNXExportError: At the first check that fails. ``about`` names it.
    """
    results = {}
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            check(written)
            results[name] = "passed"
        except NotRunError as why:
            results[name] = f"not run: {why}"
        except FaultError as fault:
            raise ONNXExportError(
                f"the export fails its check {name!r}: {fault}",
                reason=_REASONS.get(name, "EXPORT_ENGINE_FAILED"),
                remedy="use another engine or opset",
                about={"check": name, "engine": engine, "opset": written.opset},
            ) from fault
    return results


def _opset(written: Written) -> None:
    """Compare the written opset with the one asked for: an engine may silently write another."""
    for name, model in written.graphs.items():
        found = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}.get("ai.onnx")
        if found != written.opset:
            raise FaultError(f"{name} has opset {found} instead of {written.opset}")


def _paths(written: Written) -> None:
    """External data lies in regular files of the folder, and within them."""
    for name, tensor in written.stored():
        place = _place(tensor)
        if place is None:
            continue
        location, offset, length = place
        path = written.folder / location
        if not location or path.name != location or location in (".", ".."):
            raise FaultError(f"{name} has the weight {tensor.name!r} outside the folder, at {location!r}")
        if path.is_symlink() or not path.is_file():
            raise FaultError(
                f"{name} has the weight {tensor.name!r} in {location!r}, which is not a file of the folder"
            )
        if offset < 0 or length < 0 or offset + length > path.stat().st_size:
            raise FaultError(f"{name} has the weight {tensor.name!r} beyond the end of {location}")


def _valid(written: Written) -> None:
    for name in written.graphs:
        try:
            onnx.checker.check_model(str(written.folder / name))
        except onnx.checker.ValidationError as error:
            raise FaultError(f"{name} is not valid: {first_line(error)}") from error


def _shapes(written: Written) -> None:
    """Strict inference; sizes that depend on values are left open, so the weights are not read."""
    for name, model in written.graphs.items():
        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=False)
        except onnx.shape_inference.InferenceError as error:
            raise FaultError(f"the types or shapes of {name} do not fit together: {first_line(error)}") from error


def _interface(written: Written) -> None:
    """Every declared input is there and read, every declared output is there and computed."""
    for component in written.components:
        graph = written.graphs[component.file].graph
        stored = {tensor.name for tensor in graph.initializer}
        stored |= set(written.left_out.get(component.file, ()))
        inputs = [value.name for value in graph.input if value.name not in stored]
        outputs = [value.name for value in graph.output]
        wanted = [port.name for port in component.inputs], [port.name for port in component.outputs]
        if (sorted(inputs), sorted(outputs)) != tuple(map(sorted, wanted)):
            odd = sorted({*inputs, *outputs} ^ {*wanted[0], *wanted[1]})
            raise FaultError(f"{component.file} lacks or has beyond its interface: {', '.join(odd[:5])}")
        read = read_names(graph)
        unread = [name for name in inputs if name not in read and name not in component.unread]
        if unread:
            raise FaultError(f"{component.file} does not read its input {unread[0]!r}")
        made = {output for node in graph.node for output in node.output}
        constant = [name for name in outputs if name not in made]
        if constant:
            raise FaultError(f"{component.file} does not compute its output {constant[0]!r}")


def _stored_once(written: Written) -> None:
    """No two initializers above 1 KiB have equal bytes at two places. Only those with equal samples are read whole."""
    alike: dict[tuple[object, ...], dict[tuple[str, int, int], str]] = defaultdict(dict)
    for name, tensor in written.stored():
        place = _place(tensor)
        if place is None or place[2] <= INLINE_BYTES:
            continue
        with (written.folder / place[0]).open("rb") as file:
            samples = [_read(file, place, at) for at in (0, place[2] // 2, max(0, place[2] - _SAMPLE))]
        alike[(tensor.data_type, tuple(tensor.dims), *samples)].setdefault(place, f"{tensor.name!r} of {name}")
    for places in alike.values():
        digests: dict[str, str] = {}
        for place, what in places.items() if len(places) > 1 else ():
            with (written.folder / place[0]).open("rb") as file:
                sha = hashlib.sha256()
                for at in range(0, place[2], 1 << 20):
                    sha.update(_read(file, place, at, 1 << 20))
            first = digests.setdefault(sha.hexdigest(), what)
            if first != what:
                raise FaultError(f"{what} repeats the bytes of {first}")


def _metadata(written: Written) -> None:
    for name, model in written.graphs.items():
        found = {entry.key: entry.value for entry in model.metadata_props}
        wrong = [key for key, value in written.metadata.items() if found.get(key) != value]
        if wrong:
            has = f"{found[wrong[0]]!r} as" if wrong[0] in found else "no"
            raise FaultError(f"{name} has {has} {wrong[0]!r} in its metadata")


def _place(tensor: Any) -> tuple[str, int, int] | None:
    """Return where an initializer lies outside the graph: file, offset and length."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        return entries.get("location", ""), int(entries.get("offset", 0)), int(entries.get("length", 0))
    except ValueError as error:
        raise FaultError(f"the weight {tensor.name!r} has a place that is no number: {error}") from error


def _read(file: Any, place: tuple[str, int, int], at: int, length: int = _SAMPLE) -> bytes:
    file.seek(place[1] + at)
    data: bytes = file.read(min(length, place[2] - at))
    return data


def read_names(graph: Any) -> set[str]:
    """Return the names that nodes of a graph and of its subgraphs read, and those that subgraphs return."""
    found: set[str] = set()
    for node in graph.node:
        found |= set(node.input)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found |= read_names(inner) | {value.name for value in inner.output}
    return found


Check = Callable[[Written], None]
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "opset": _opset,
        "paths": _paths,
        "valid": _valid,
        "shapes": _shapes,
        "interface": _interface,
        "stored once": _stored_once,
        "metadata": _metadata,
        "loads": load,
        "caches": grow_caches,
        "reference": agree_with_reference,
    }
)
"""The checks in order, by name."""
