"""Writing of the prepared tensors into safetensors files; the layout is known before the first tensor is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipway.errors import CheckpointValidationError
from slipway.folders.disk_full import translate_disk_full
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files
from slipway.stage import Context
from slipway_prepare.recipes import Recipe
from slipway_prepare.source import DTYPES, Source

STORED_AS = {dtype: name for name, dtype in DTYPES.items()}
"""The safetensors name of each type."""


def write_weights(
    folder: Path, recipes: Sequence[Recipe], source: Source, *, max_shard_bytes: int, ctx: Context
) -> int:
    """Compute and write every tensor, one at a time, and return the bytes of tensor data.

    Raises:
        CheckpointValidationError: ``NON_FINITE_WEIGHTS``, ``DISK_FULL``, and the errors of reading.
        StageError: ``CANCELLED``.
    """
    by_name = {recipe.name: recipe for recipe in recipes}
    groups = [(TensorSpec(recipe.name, STORED_AS[recipe.dtype], recipe.shape),) for recipe in recipes]
    files = plan_files(groups, max_shard_bytes=max_shard_bytes)
    total, done = sum(tensor.nbytes for file in files for tensor in file.tensors), 0
    with translate_disk_full(CheckpointValidationError, "for the prepared base model", at=folder):
        for file in files:
            for block_bytes in write_file(folder, file, by_name, source, check=_check_finite):
                done += block_bytes
                ctx.progress("preparing", done=done, total=total, unit="bytes")
        weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
        if index := index_file(weight_map, total_bytes=total):
            (folder / index[0]).write_text(index[1], encoding="utf-8")
    return total


def write_file(
    folder: Path,
    planned: PlannedFile,
    recipes: Mapping[str, Recipe],
    source: Source,
    *,
    check: Callable[[Tensor, Recipe], None] = lambda _block, _recipe: None,
) -> Iterator[int]:
    """Write one file and yield the size of every block written; ``check`` may refuse a block before it is written."""

    def values(tensor: TensorInfo) -> Iterator[memoryview]:
        for block in _blocks(recipes[tensor.name], source):
            check(block, recipes[tensor.name])
            yield block.contiguous().reshape(-1).view(torch.uint8).numpy().data

    pieces = planned.write(folder / planned.filename, values)
    next(pieces)  # the header
    yield from map(len, pieces)


def _blocks(recipe: Recipe, source: Source) -> Iterator[Tensor]:
    if recipe.build is None:
        yield from source.blocks(recipe.parts[0])
        return
    value = recipe.build(source.read)
    assert value.dtype == recipe.dtype, f"{recipe.name}: {value.dtype}, planned {recipe.dtype}"
    assert tuple(value.shape) == recipe.shape, f"{recipe.name}: {tuple(value.shape)}, planned {recipe.shape}"
    yield from value.contiguous().reshape(-1).split(4 << 20)


def _check_finite(block: Tensor, recipe: Recipe) -> None:
    if block.numel() == 0 or not block.is_floating_point():
        return
    low, high = torch.aminmax(block)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CheckpointValidationError(
            f"tensor {recipe.name!r} of the base model holds NaN or infinity"
            + ("" if recipe.build is None else f" after conversion to {str(recipe.dtype).removeprefix('torch.')}"),
            reason="NON_FINITE_WEIGHTS",
            remedy="copy the base model again, or use its 16-bit version",
            about={"tensor": recipe.name},
        )
