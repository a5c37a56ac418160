"""Check a written folder: each check passes, fails by name with a reason, or is *not run* by name with a reason.

Some checks load the graphs in ONNX Runtime, and run them if they are tiny.
"""

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
from slipway.proof.onnx_errors import translate_ort_errors
from slipway_onnx_export.checks.written import FaultError, GraphLike, NotRunError, WrittenFolder
from slipway_onnx_export.names import INLINE_BYTES, PAST, PRESENT

_TOLERANCE = 1e-3
NOT_TINY = "the graphs are too large or lack their weights"

_SAMPLE = 4096
_REASONS = {"opset": "OPSET_UNSUPPORTED", "reference": "EXPORT_PARITY_FAILED"}
"""Reasons of checks that fail; the others fail with the engine's."""

Check = Callable[[WrittenFolder], None]


def check_folder(written: WrittenFolder, *, engine: str, checks: Mapping[str, Check] | None = None) -> dict[str, str]:
    """Run every check of a written folder, in order.

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


def read_names(graph: Any) -> set[str]:
    """Return the names that nodes of a graph and of its subgraphs read, and those that subgraphs return."""
    names: set[str] = set()
    for node in graph.node:
        names |= set(node.input)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names |= read_names(inner) | {value.name for value in inner.output}
    return names


def open_unoptimized(path: Path) -> Any:
    """Load a graph with one thread. Nothing is optimized or packed, so its weights are mapped, and read only when they are used.

    Raises:
        FaultError: ONNX Runtime cannot load it.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    what = f"onnxruntime {onnxruntime.__version__} cannot load {path.name}"
    with translate_ort_errors(lambda error: FaultError(f"{what}: {first_line(error)}")):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _check_opset(written: WrittenFolder) -> None:
    """Compare the written opset with the one asked for: an engine may silently write another."""
    for name, model in written.graphs.items():
        opset = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}.get("ai.onnx")
        if opset != written.opset:
            raise FaultError(f"{name} has opset {opset} instead of {written.opset}")


def _check_paths(written: WrittenFolder) -> None:
    """Check that external data lies in regular files of the folder, and within them."""
    for name, tensor in written.initializers():
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


def _check_validity(written: WrittenFolder) -> None:
    for name in written.graphs:
        try:
            onnx.checker.check_model(str(written.folder / name))
        except onnx.checker.ValidationError as error:
            raise FaultError(f"{name} is not valid: {first_line(error)}") from error


def _check_shapes(written: WrittenFolder) -> None:
    """Infer shapes strictly. Sizes that depend on values stay open, so the weights are not read."""
    for name, model in written.graphs.items():
        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=False)
        except onnx.shape_inference.InferenceError as error:
            raise FaultError(f"the types or shapes of {name} do not fit together: {first_line(error)}") from error


def _check_interface(written: WrittenFolder) -> None:
    """Check that the graph has and reads every declared input, and has and computes every declared output."""
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


def _check_stored_once(written: WrittenFolder) -> None:
    """Check that no bytes of an initializer above 1 KiB are stored twice. Only those with equal samples are read whole."""
    alike: dict[tuple[object, ...], dict[tuple[str, int, int], str]] = defaultdict(dict)
    for name, tensor in written.initializers():
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


def _check_metadata(written: WrittenFolder) -> None:
    for name, model in written.graphs.items():
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        wrong = [key for key, value in written.metadata.items() if metadata.get(key) != value]
        if wrong:
            has = f"{metadata[wrong[0]]!r} as" if wrong[0] in metadata else "no"
            raise FaultError(f"{name} has {has} {wrong[0]!r} in its metadata")


def _check_loading(written: WrittenFolder) -> None:
    """Check that each graph loads."""
    for component in written.components:
        open_unoptimized(written.folder / component.file)


def _check_caches(written: WrittenFolder) -> None:
    """Check that no graph returns a cache of length zero, after an empty past or a longer one."""
    for component in written.components:
        for value in written.graphs[component.file].graph.output:
            fixed = [axis.dim_value for axis in value.type.tensor_type.shape.dim if axis.HasField("dim_value")]
            if 0 in fixed:
                raise FaultError(f"{component.file} returns {value.name!r} of length zero")
    if not written.tiny:
        raise NotRunError(NOT_TINY + "; the comparison with PyTorch or the validation runs them")
    for component in (each for each in written.components if any(out.name.startswith(PRESENT) for out in each.outputs)):
        for past in (0, 4):
            for name, array in _run(written, component, past=past).items():
                if name.startswith(PRESENT) and 0 in array.shape:
                    raise FaultError(f"{component.file} returns {name!r} of length zero after {past} tokens")


def _check_against_reference(written: WrittenFolder) -> None:
    """Check that ONNX's own reference gives the results of ONNX Runtime."""
    if not written.tiny:
        raise NotRunError(NOT_TINY)
    unknown: list[NotRunError] = []
    for component in written.components:
        past = 2 if any(PAST in port.shape for port in component.inputs) else 0
        try:
            feed = written.feed(component, past=past, new=3)
        except NotRunError as why:  # the others are run nevertheless
            unknown.append(why)
            continue
        results = _run(written, component, past=past)
        try:
            reference = ReferenceEvaluator(onnx.load(written.folder / component.file))
            wanted = reference.run(list(results), feed)
        except Exception as error:  # the reference lets any exception of an operator's Python code through
            raise NotRunError(f"the reference cannot run {component.file}: {first_line(error)}") from error
        for (name, array), other in zip(results.items(), wanted, strict=True):
            scale = max(1.0, float(np.abs(other).max(initial=0)))
            far = (
                float(np.abs(array.astype(np.float64) - other).max(initial=0))
                if array.shape == other.shape
                else float("inf")
            )
            if not far <= _TOLERANCE * scale:
                raise FaultError(f"{name!r} of {component.file} differs from ONNX's reference by {far:.3g}")
    if unknown:
        raise unknown[0]


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


def _run(written: WrittenFolder, component: GraphLike, *, past: int) -> dict[str, Any]:
    session = open_unoptimized(written.folder / component.file)
    names = [value.name for value in session.get_outputs()]
    with translate_ort_errors(
        lambda error: FaultError(f"onnxruntime cannot run {component.file}: {first_line(error)}")
    ):
        return dict(zip(names, session.run(names, written.feed(component, past=past, new=3)), strict=True))


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "opset": _check_opset,
        "paths": _check_paths,
        "valid": _check_validity,
        "shapes": _check_shapes,
        "interface": _check_interface,
        "stored once": _check_stored_once,
        "metadata": _check_metadata,
        "loads": _check_loading,
        "caches": _check_caches,
        "reference": _check_against_reference,
    }
)
"""The checks in order, by name."""
