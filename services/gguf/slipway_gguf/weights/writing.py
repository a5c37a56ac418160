"""Write a GGUF file: the header, then each tensor in blocks of rows that several threads convert."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway_gguf.architectures.entry import Change
from slipway_gguf.metadata import Field
from slipway_gguf.weights.ggml import library, quantize
from slipway_gguf.weights.header import Entry, header, padding
from slipway_gguf.weights.planned import Part, Planned

BLOCK_WEIGHTS = 1 << 20
"""Number of weights that a thread converts at once: 4 MiB in float32."""
_LARGEST = np.frombuffer(np.float32(65504.0).tobytes(), np.uint32)[0]
"""Bits, as a float32, of float16's largest number; every type but float32 and bfloat16 stores its scales or values in float16."""
_INFINITE, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_WIDE = (Kind.F32, Kind.BF16)

Importance = Mapping[str, NDArray[np.float32]]


class _Overflow(Exception):  # noqa: N818 - it is no error: the tensor is stored in another type
    """A tensor has values beyond float16."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written.

    Attributes:
        path: The file.
        sha256: Its SHA-256 in hexadecimal.
        size: Its size in bytes.
        entries: Its tensors.
        widened: Names of the tensors with values beyond float16, which are stored in a wider type than the level's.
    """

    path: Path
    sha256: str
    size: int
    entries: tuple[Entry, ...]
    widened: tuple[str, ...]


def write_file(
    path: Path,
    fields: Sequence[Field],
    tensors: Sequence[Planned],
    kinds: Mapping[str, Kind],
    *,
    importance: Importance,
    threads: int,
    on_bytes: Callable[[int, int], None],
) -> Written:
    """Write a file.

    Args:
        path: The file, which must not exist.
        fields: Its metadata.
        tensors: Its tensors.
        kinds: Type of each tensor by name.
        importance: Importance of each column by name of a tensor, for tensors that have one.
        threads: Number of threads that convert.
        on_bytes: Called with the numbers of written and of all bytes.

    Raises:
        GGUFExportError: ``NON_FINITE_WEIGHTS``.
        OSError: For example ENOSPC.
    """
    library()
    widened: list[str] = []
    chosen = dict(kinds)
    while True:
        try:
            entries = [Entry(each.name, each.shape, chosen[each.name]) for each in tensors]
            digest = _write(path, fields, tensors, entries, importance=importance, threads=threads, on_bytes=on_bytes)
        except _Overflow as overflow:
            path.unlink()
            for each in _find_beyond_float16(tensors, chosen, first=str(overflow)):
                widened.append(each.name)
                chosen[each.name] = _wider_kind(each)
        else:
            return Written(path, digest, path.stat().st_size, tuple(entries), tuple(widened))


def _write(
    path: Path,
    fields: Sequence[Field],
    tensors: Sequence[Planned],
    entries: Sequence[Entry],
    *,
    importance: Importance,
    threads: int,
    on_bytes: Callable[[int, int], None],
) -> str:
    """Write a file, and return its digest."""
    total = sum(entry.nbytes + padding(entry.nbytes) for entry in entries)
    digest, done = hashlib.sha256(), 0
    with path.open("xb") as file:
        start = header(fields, entries)
        digest.update(start)
        file.write(start)
        for data in _run_in_order(_pieces(tensors, entries, importance), threads):
            digest.update(data)
            done += file.write(data)
            on_bytes(done, total)
    return digest.hexdigest()


Work = Callable[[], memoryview | bytes]


def _pieces(tensors: Sequence[Planned], entries: Sequence[Entry], importance: Importance) -> Iterator[Work]:
    """Yield the work for each block of each tensor, and for the padding behind the tensor."""
    for planned, entry in zip(tensors, entries, strict=True):
        weight = importance.get(planned.name)
        for part, block in planned.blocks(BLOCK_WEIGHTS):
            name = part.tensor.name if part else planned.name
            yield _work(block, planned, part, kind=entry.kind, weight=weight, name=name)
        if entry.nbytes and padding(entry.nbytes):
            yield partial(bytes, padding(entry.nbytes))


def _work(
    block: NDArray[Any],
    planned: Planned,
    part: Part | None,
    *,
    kind: Kind,
    weight: NDArray[np.float32] | None,
    name: str,
) -> Work:
    def convert() -> memoryview:
        values = float32_rows(block, planned, part)
        _check_values(values, planned.name, name, limited=kind not in _WIDE)
        return quantize(values, kind, weight)

    return convert


def float32_rows(block: NDArray[Any], planned: Planned, part: Part | None) -> NDArray[np.float32]:
    """Return a block as contiguous rows in float32. (rows, columns)."""
    if block.dtype.name == "bfloat16":
        widened = block.view(np.uint16).astype(np.uint32)
        widened <<= np.uint32(16)
        values = widened.view(np.float32)
    else:
        values = block.astype(np.float32)
    # A copy of a transposed view keeps its order.
    rows = np.ascontiguousarray(values).reshape(-1, planned.shape[-1])
    if part is not None and part.piece.factor != 1.0:
        with np.errstate(over="ignore"):  # an overflow is infinite, which is refused
            rows *= np.float32(part.piece.factor)
    if planned.change is Change.NEGATED_EXPONENTIAL:
        with np.errstate(over="ignore"):
            rows = (-np.exp(rows.astype(np.float64))).astype(np.float32)
    if planned.offset:
        rows += np.float32(planned.offset)
    return rows


def _check_values(values: NDArray[np.float32], planned: str, tensor: str, *, limited: bool) -> None:
    largest = (values.view(np.uint32) & _MAGNITUDE).max(initial=np.uint32(0))
    if largest >= _INFINITE:
        raise GGUFExportError(
            f"weight {tensor!r} contains NaN or infinity",
            reason="NON_FINITE_WEIGHTS",
            remedy="check the checkpoint: training may have diverged",
            about={"tensor": tensor},
        )
    if limited and largest > _LARGEST:
        raise _Overflow(planned)


def _find_beyond_float16(tensors: Sequence[Planned], kinds: Mapping[str, Kind], *, first: str) -> Iterator[Planned]:
    """Yield the tensors with values beyond float16, from tensor ``first`` on."""
    names = [each.name for each in tensors]
    for planned in tensors[names.index(first) :]:
        if kinds[planned.name] in _WIDE:
            continue
        try:
            for part, block in planned.blocks(BLOCK_WEIGHTS):
                name = part.tensor.name if part else planned.name
                _check_values(float32_rows(block, planned, part), planned.name, name, limited=True)
        except _Overflow:
            yield planned


def _wider_kind(planned: Planned) -> Kind:
    """Return a type that holds a tensor's values without rounding: bfloat16 if it is stored so, otherwise float32."""
    return Kind.BF16 if all(part.tensor.dtype == "BF16" for part in planned.parts) else Kind.F32


def _run_in_order(work: Iterator[Work], threads: int) -> Iterator[memoryview | bytes]:
    """Yield the results of the work in order, while several threads work a little ahead."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[memoryview | bytes]] = deque()
        try:
            for each in work:
                waiting.append(pool.submit(each))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
