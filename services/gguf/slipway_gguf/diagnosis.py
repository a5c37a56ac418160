"""Compare a GGUF file with its model: check a file that was just written, and say which tensors differ and how.

In a written file ggml must find every tensor, and some rows of each, dequantized by other code, must be the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway_gguf.architectures import architecture_of, text_part
from slipway_gguf.files import text_files
from slipway_gguf.weights.completeness import EMBEDDING, HEAD
from slipway_gguf.weights.ggml import StoredTensor, row_bytes, stored_tensors
from slipway_gguf.weights.planned import Planned
from slipway_gguf.weights.tensors import PlannedFile, plan_file
from slipway_gguf.weights.writing import Written, float32_rows

_SAMPLED_ROWS = 4
"""Most rows to compare at each place of a tensor."""
_NOISE = {
    Kind.F32: 1e-7,
    Kind.F16: 1e-3,
    Kind.BF16: 5e-3,
    Kind.Q8_0: 1.5e-2,
    Kind.Q6_K: 5e-2,
    Kind.Q5_K: 1e-1,
    Kind.Q5_0: 1e-1,
    Kind.Q5_1: 1e-1,
    Kind.Q4_K: 2e-1,
    Kind.Q4_0: 2e-1,
    Kind.Q4_1: 2e-1,
    Kind.IQ4_XS: 2e-1,
    Kind.IQ4_NL: 2e-1,
}
"""Largest noise of rounding, relative to the values' energy (root mean square): about twice that of normally distributed weights."""
_SMALLEST = 2.0**-24
"""Distance between the smallest numbers of float16, which stores values or the scales of blocks."""
_MULTIPLES = {
    Kind.F16: 1,
    Kind.Q8_0: 127,
    Kind.Q6_K: 127 * 32,
    Kind.Q5_K: 63 * 31,
    Kind.Q5_0: 16,
    Kind.Q5_1: 32,
    Kind.Q4_K: 63 * 15,
    Kind.Q4_0: 8,
    Kind.Q4_1: 16,
    Kind.IQ4_XS: 32 * 127,
    Kind.IQ4_NL: 127,
}
"""Largest multiple of a block's scale. Rows near zero (tokens never trained) may be off by this multiple of the smallest number."""

_EXPLAINED_ROWS = 8
_STRANGE = 0.5
"""Distance from the model's values, relative to their energy, that no type explains: it is 0.2 for 4 bits, 1.4 for unrelated weights."""
_SHOWN = 3
_HEAD_ROWS = 4096
"""Most rows of a head to compare with the embedding, to limit memory."""


def check_file(written: Written, tensors: list[Planned]) -> dict[str, Any]:
    """Read a file back, compare it with the model, and return facts for the report.

    Raises:
        GGUFExportError: ``GGUF_INVALID``.
    """
    stored = stored_tensors(written.path)
    expected = [(entry.name, entry.kind, entry.shape) for entry in written.entries]
    actual = [(each.name, each.kind, _pad_shape(each.shape, written, index)) for index, each in enumerate(stored)]
    if actual != expected:
        wrong = next(
            (pair for pair in zip(actual, expected, strict=False) if pair[0] != pair[1]), (len(actual), len(expected))
        )
        raise _invalid_error(written.path, f"ggml finds {wrong[0]}, and {wrong[1]} was written")
    worst, where = 0.0, ""
    for planned, tensor in zip(tensors, stored, strict=True):
        share = _noise(written.path, planned, tensor) / _NOISE[tensor.kind]
        if share > worst:
            worst, where = share, planned.name
    if worst > 1.0:
        raise _invalid_error(
            written.path, f"tensor {where!r} is {worst:.3g} times as far from the model's as its type explains"
        )
    return {"tensors_read_back": len(stored), "worst_share_of_expected_noise": round(worst, 4)}


def _pad_shape(shape: tuple[int, ...], written: Written, index: int) -> tuple[int, ...]:
    """Add the leading axes of size 1 that the tensor was written with; ggml drops them."""
    lacking = len(written.entries[index].shape) - len(shape) if index < len(written.entries) else 0
    return (1,) * lacking + shape


def _noise(path: Path, planned: Planned, stored: StoredTensor) -> float:
    """Return the largest distance of some rows from the model's, relative to the energy of these rows."""
    worst = 0.0
    for row, source, block in planned.samples():
        values = float32_rows(block, planned, source)[:_SAMPLED_ROWS]
        read = _rows(path, planned, stored, first=row, count=len(values))
        energy = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        distance = float(np.sqrt(np.mean(np.square(read.astype(np.float64) - values))))
        distance = max(0.0, distance - _MULTIPLES.get(stored.kind, 0) * _SMALLEST)
        worst = max(worst, distance / energy if energy else math.inf if distance else 0.0)
    return worst


def _rows(path: Path, planned: Planned, stored: StoredTensor, *, first: int, count: int) -> NDArray[np.float32]:
    """Read and dequantize rows of a tensor. (count, columns)."""
    size = row_bytes(stored.kind, planned.shape[-1])
    with path.open("rb") as file:
        file.seek(stored.offset + first * size)
        raw = np.frombuffer(file.read(count * size), np.uint8).reshape(count, size)
    return gguf.quants.dequantize(raw, stored.kind).astype(np.float32)


def _invalid_error(path: Path, what: str) -> GGUFExportError:
    return GGUFExportError(
        f"{path.name} is not what was written: {what}",
        remedy="check the disk and the versions of xllamacpp and gguf; report it if both are those of constraints.txt",
        about={"file": path.name},
    )


def explain(folder: Path, model: Path, *, exact: bool = True) -> str:
    """Describe what is wrong with the tensors of a file; return an empty text if they are the model's.

    Args:
        folder: Folder of the file.
        model: Folder of the model that the file was written from.
        exact: Whether the file should hold that model's values. If not, an adapter changed them, so check only for lost tensors and
            wrong order.

    Raises:
        GGUFExportError: The model has no place in a GGUF file.
    """
    config = ModelConfig.read(model)
    if architecture_of(text_part(config) or config) is None:
        return ""
    [file] = text_files(folder)
    reader, plan = gguf.GGUFReader(file), plan_file(model)
    stored, planned = {each.name: each for each in reader.tensors}, plan.tensors
    faults = [*_describe_missing(planned, stored), *_describe_other_head(planned, stored)]
    faults += _describe_other_pooling(plan, reader)
    wrong = [each for each in planned if each.name in stored and _is_strange(each, stored[each.name])]
    turned = [each for each in wrong if _has_own_order(each, stored[each.name])]
    if turned:
        faults.append(
            f"the rows of queries and keys are not in llama.cpp's order but in transformers' ({_names(turned)}): its rotary embedding turns "
            "other pairs of values"
        )
    others = [each for each in wrong if each not in turned]
    if others and exact:
        faults.append(f"{len(others)} tensors hold other values than the model's ({_names(others)})")
    return "; ".join(faults)


def _describe_missing(planned: list[Planned], stored: Mapping[str, Any]) -> list[str]:
    lacking = [each for each in planned if each.name not in stored]
    faults = [
        f"its head is lost: the model has one of its own, and the file has no {HEAD}, for which llama.cpp takes {EMBEDDING}"
        for each in lacking
        if each.name == HEAD
    ]
    others = [each for each in lacking if each.name != HEAD]
    return [*faults, *([f"it lacks {len(others)} tensors ({_names(others)})"] if others else [])]


def _describe_other_pooling(plan: PlannedFile, reader: gguf.GGUFReader) -> list[str]:
    """Describe a pooling of the file that is not the model's."""
    key = f"{plan.parameters.architecture.name}.pooling_type"
    wanted = next((field.value for field in plan.parameters.fields if field.key == key), None)
    field = reader.fields.get(key)
    found = field.contents() if field is not None else None
    if plan.sentences is None or wanted == found:
        return []
    ours, theirs = (_pooling_name(number) for number in (found, wanted))
    return [f"it makes one vector of a text by the pooling {ours!r}, and the model by {theirs!r}"]


def _pooling_name(number: int | None) -> str:
    return "none" if number is None else gguf.PoolingType(number).name.lower()


def _describe_other_head(planned: list[Planned], stored: Mapping[str, Any]) -> list[str]:
    """Describe the head of a file if the model ties its head to the embedding, but the file's head and embedding differ."""
    if HEAD not in stored or EMBEDDING not in stored or any(each.name == HEAD for each in planned):
        return []
    head, embedding = stored[HEAD], stored[EMBEDDING]
    if head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data):
        return []
    step = 1 + len(head.data) // _HEAD_ROWS
    taken = (gguf.quants.dequantize(each.data[::step], each.tensor_type) for each in (head, embedding))
    own, tied = (values.astype(np.float64) for values in taken)
    far = float(np.sqrt(np.sum(np.square(own - tied)) / np.sum(np.square(tied)))) if own.shape == tied.shape else 1.0
    if head.tensor_type != embedding.tensor_type and far <= _STRANGE:
        return []  # both are rounded, each in its own way
    return [
        f"its head is not the model's: the model's is {EMBEDDING}, but the file has another {HEAD}, {far:.0%} away from it, and llama.cpp takes that"
    ]


def _names(tensors: list[Planned]) -> str:
    more = ", …" if len(tensors) > _SHOWN else ""
    return ", ".join(each.name for each in tensors[:_SHOWN]) + more


def _pairs(planned: Planned, stored: Any, *, own_order: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield rows of the model and the same rows of the file; with ``own_order``, take the model's rows in its own order."""
    columns = planned.shape[-1]
    data = stored.data.reshape(-1, *stored.data.shape[-1:]) if stored.data.ndim > 1 else stored.data[None]
    for first, source, block in planned.samples():
        part = block.swapaxes(1, 2) if own_order else block
        rows = float32_rows(part, planned, source).reshape(-1, columns)[:_EXPLAINED_ROWS]
        yield rows, gguf.quants.dequantize(data[first : first + len(rows)], stored.tensor_type).reshape(-1, columns)


def _is_strange(planned: Planned, stored: Any, *, own_order: bool = False) -> bool:
    """Return whether values differ by more than rounding."""
    if tuple(int(size) for size in reversed(stored.shape)) != planned.shape[-len(stored.shape) :]:
        return True
    for wanted, actual in _pairs(planned, stored, own_order=own_order):
        energy = float(np.sqrt(np.mean(np.square(wanted, dtype=np.float64))))
        distance = float(np.sqrt(np.mean(np.square(actual.astype(np.float64) - wanted))))
        if not distance <= _STRANGE * energy:
            return True
    return False


def _has_own_order(planned: Planned, stored: Any) -> bool:
    """Return whether a tensor still has the model's order of rows although llama.cpp needs another."""
    changes = len(planned.shape) > 1 and all(block.ndim > len(planned.shape) for _, _, block in planned.samples())
    return changes and not _is_strange(planned, stored, own_order=True)
