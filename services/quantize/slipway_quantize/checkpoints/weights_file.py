"""Write the weights of a Hugging Face folder: in any planned layout, or cast to fp16 or bf16, a few rows at a time.

The layout of the safetensors is known before the first weight is read, so that no weight stays in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slipway.model.dtypes import DTYPES, FLOATS, torch_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files
from slipway.model.weights.reading import Weights, row_pieces
from slipway.stage import Context
from slipway_quantize.divided import PartWork
from slipway_quantize.model_weights import (
    DTYPE_NAMES,
    as_array,
    as_tensor,
    cast_to_half,
    limit_torch,
    read_rows,
    read_tensors,
    require_finite,
)
from slipway_quantize.pieces import PIECE_WEIGHTS, write_all
from slipway_quantize.report import Outcome, read_json, write_json

HALVES = {"fp16": "F16", "bf16": "BF16"}
"""Types of the levels at which all weights are cast, by their names in a safetensors header."""


class WeightsFile:
    """A Hugging Face folder's weights, written in any order.

    One ``model.safetensors``, or shards of at most ``max_shard_bytes`` (one larger tensor makes one larger shard) with
    their index. The tensors of one group stay in one shard, because loaders expect the parts of a quantized weight
    together.

    Args:
        folder: Existing folder to write into.
        groups: Every tensor that will be written, in groups.
        max_shard_bytes: Largest size of one file's data.
        work: The part of the files to write, into its own folder and without an index; what is written of other files is ignored.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[TensorSpec]],
        *,
        max_shard_bytes: int,
        work: PartWork | None = None,
    ) -> None:
        files: Sequence[PlannedFile] = plan_files(groups, max_shard_bytes=max_shard_bytes)
        self._elsewhere: frozenset[str] = frozenset()
        if work is not None:
            work.planned, folder = files, work.folder
            files = work.files
            own = {tensor.name for file in files for tensor in file.tensors}
            self._elsewhere = frozenset(spec.name for group in groups for spec in group) - own
        self._places: dict[str, tuple[int, TensorInfo]] = {}
        self._open = ExitStack()
        try:
            for file in files:
                self._create(folder, file)
        except BaseException:
            self._open.close()
            raise
        weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
        total = sum(tensor.nbytes for file in files for tensor in file.tensors)
        if work is None and (index := index_file(weight_map, total_bytes=total)):
            (folder / index[0]).write_text(index[1], encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def holds(self, name: str) -> bool:
        """Return whether a planned tensor is written here, and not by another part."""
        return name not in self._elsewhere

    def write(self, name: str, values: NDArray[Any], *, row: int = 0) -> None:
        """Write ``values`` as rows of tensor ``name``, starting at ``row``.

        Raises:
            OSError: For example ENOSPC.
        """
        if not self.holds(name):
            return
        place = self._places[name][1]
        if DTYPE_NAMES[values.dtype] != place.dtype or values.shape[1:] != place.shape[1:]:
            raise AssertionError(f"{name}: {values.dtype} {values.shape} does not fit {place}")
        self.write_bytes(name, np.ascontiguousarray(values), row=row)

    def write_bytes(self, name: str, values: NDArray[Any], *, row: int) -> None:
        """Write the bytes of an array as rows of tensor ``name``, starting at ``row``; several threads can write at once.

        Raises:
            OSError: For example ENOSPC.
        """
        if not self.holds(name):
            return
        descriptor, place = self._places[name]
        row_bytes = place.nbytes // max(1, place.shape[0]) if place.shape else 0
        write_all(descriptor, values.reshape(-1).view(np.uint8).data, place.start + row * row_bytes)

    def _create(self, folder: Path, file: PlannedFile) -> None:
        descriptor = os.open(folder / file.filename, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._open.callback(os.close, descriptor)
        write_all(descriptor, memoryview(file.header), 0)
        os.truncate(descriptor, file.nbytes)
        self._places |= {tensor.name: (descriptor, tensor) for tensor in file.tensors}


def write_half(
    weights: Weights, target: Path, *, level: str, max_shard_bytes: int, ctx: Context, work: PartWork | None = None
) -> Outcome:
    """Write a folder's weights in ``level``'s type, and ``target``'s config.json to match. Imports torch if a weight has another type.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, ``WEIGHT_OVERFLOW``, and the reasons of :func:`read_tensors`.
    """
    dtype = HALVES[level]
    name = DTYPES[dtype].torch
    outcome = Outcome(method=f"cast to {name}")
    tensors = read_tensors(weights).values()
    plan = [TensorSpec(t.name, dtype if t.dtype in FLOATS else t.dtype, t.shape) for t in tensors]
    if any(spec.dtype != tensor.dtype for spec, tensor in zip(plan, tensors, strict=True)):
        limit_torch(ctx.threads)
    done = 0
    with WeightsFile(target, [[spec] for spec in plan], max_shard_bytes=max_shard_bytes, work=work) as file:
        total = sum(tensor.nbytes for tensor in tensors if file.holds(tensor.name))
        for tensor in tensors:
            for row, count in row_pieces(tensor, PIECE_WEIGHTS) if file.holds(tensor.name) else ():
                values = read_rows(weights, tensor, row, count)
                ctx.progress("cast", done=done, total=total)
                file.write(tensor.name, _cast(values, dtype, tensor), row=row)
                done += values.nbytes
            if tensor.dtype not in FLOATS:
                outcome.kept[tensor.name] = "not floating point"
            elif tensor.dtype == dtype:
                outcome.kept[tensor.name] = "already in this type"
            else:
                outcome.quantized.append(tensor.name)
    ctx.progress("cast", done=done, total=total)
    if not outcome.quantized:
        ctx.warn(f"the model is already in {level}: the level {level} saves nothing")
    config = read_json(target / "config.json")
    config.pop("torch_dtype", None)  # the older name of the same key
    write_json(target / "config.json", {**config, "dtype": name})
    return outcome


def _cast(values: NDArray[Any], dtype: str, tensor: TensorInfo) -> NDArray[Any]:
    """Return values of a tensor in a 16-bit type; those that are no floats as they are."""
    if tensor.dtype not in FLOATS:
        return values
    if tensor.dtype == dtype:
        require_finite(values, tensor.name)
        return values
    return as_array(cast_to_half(as_tensor(values), torch_dtypes(dtype)[dtype], tensor.name))
