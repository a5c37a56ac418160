"""Writes the prepared tensors into safetensors files whose layout is known before the first one is computed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipway.disk_full import disk_full_is_typed
from slipway.errors import CheckpointValidationError
from slipway.safetensors_file import INDEX_SUFFIX
from slipway.stage import Context
from slipway_prepare.recipes import Recipe
from slipway_prepare.source import DTYPES, Source

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_weights(
    folder: Path, recipes: Sequence[Recipe], source: Source, *, max_shard_bytes: int, ctx: Context
) -> int:
    """Compute and write every tensor, one at a time; returns the bytes of tensor data.

    Raises:
        CheckpointValidationError: ``NON_FINITE_WEIGHTS``, ``DISK_FULL``, and what reading raises.
        StageError: ``CANCELLED``.
    """
    shards = _shards(recipes, max_shard_bytes)
    total, done = sum(map(_nbytes, recipes)), 0
    count = len(shards)
    weight_map: dict[str, str] = {}
    with disk_full_is_typed(CheckpointValidationError, "for the prepared base model", at=folder):
        for number, shard in enumerate(shards, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            for block_bytes in _write_shard(folder / name, shard, source):
                done += block_bytes
                ctx.progress("preparing", done=done, total=total, unit="bytes")
            weight_map |= {recipe.name: name for recipe in shard}
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _write_shard(path: Path, shard: Sequence[Recipe], source: Source) -> Iterator[int]:
    """Write one file; yields the size of every block that is written."""
    header = _header(shard)
    with path.open("xb") as file:
        size = len(header) + sum(map(_nbytes, shard))
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is found before the work, not after it
        file.write(header)
        for recipe in shard:
            written = 0
            for block in _blocks(recipe, source):
                _check_finite(block, recipe)
                raw = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(raw)
                written += raw.nbytes
                yield raw.nbytes
            assert written == _nbytes(recipe), f"{recipe.name}: {written} bytes, planned {_nbytes(recipe)}"


def _blocks(recipe: Recipe, source: Source) -> Iterator[Tensor]:
    if recipe.build is None:
        yield from source.blocks(recipe.parts[0])
        return
    value = recipe.build(source.read)
    assert value.dtype == recipe.dtype, f"{recipe.name}: {value.dtype}, planned {recipe.dtype}"
    assert tuple(value.shape) == recipe.shape, f"{recipe.name}: {tuple(value.shape)}, planned {recipe.shape}"
    yield from value.contiguous().reshape(-1).split(4 << 20)


def _header(shard: Sequence[Recipe]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for recipe in shard:
        span = [offset, offset + _nbytes(recipe)]
        header[recipe.name] = {"dtype": _NAMES[recipe.dtype], "shape": list(recipe.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(recipes: Sequence[Recipe], max_shard_bytes: int) -> list[list[Recipe]]:
    shards: list[list[Recipe]] = [[]]
    filled = 0
    for recipe in recipes:
        if shards[-1] and filled + _nbytes(recipe) > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(recipe)
        filled += _nbytes(recipe)
    # Wider types first, as the reference implementation does: every tensor is then aligned to its type.
    return [sorted(shard, key=lambda recipe: (-recipe.dtype.itemsize, recipe.name)) for shard in shards]


def _nbytes(recipe: Recipe) -> int:
    return math.prod(recipe.shape) * recipe.dtype.itemsize


def _check_finite(block: Tensor, recipe: Recipe) -> None:
    if block.numel() == 0 or not block.is_floating_point():
        return
    low, high = torch.aminmax(block)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CheckpointValidationError(
            f"tensor {recipe.name!r} of the base model holds NaN or infinity"
            + ("" if recipe.build is None else f" once it is {str(recipe.dtype).removeprefix('torch.')}"),
            reason="NON_FINITE_WEIGHTS",
            remedy="copy the base model again, or use its 16-bit version",
            about={"tensor": recipe.name},
        )
