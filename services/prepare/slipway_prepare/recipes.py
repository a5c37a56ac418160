"""Recipes for the tensors of the prepared base, checked before any value is read, and the writing of their files.

The layout of the safetensors files is known before the first tensor is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipway.errors import CheckpointValidationError
from slipway.machine.shortages import translate_disk_full
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files
from slipway.stage import Context
from slipway_prepare.faults import invalid_error
from slipway_prepare.source import DTYPES, Source, Stored

if TYPE_CHECKING:
    from slipway_prepare.structure import Structure


Read = Callable[[str], Tensor]
HALVES = (torch.float16, torch.bfloat16)

STORED_AS = {dtype: name for name, dtype in DTYPES.items()}
"""The safetensors name of each type."""


@dataclass(frozen=True)
class Recipe:
    """One tensor of the result.

    Attributes:
        name: Its name.
        dtype: Its type.
        shape: Its shape.
        parts: Names of the stored tensors it is computed from.
        build: Computes it from them; None copies the only part.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    build: Callable[[Read], Tensor] | None = None


@dataclass(frozen=True)
class Dequantized:
    """The plan that a format's reader makes for a stored model.

    Attributes:
        method: The format as users read it, such as ``bitsandbytes nf4``.
        recipes: The weights that are computed; every other tensor is copied.
        dropped: Tensors that only matter when computing with quantized weights (such as activation scales).
        details: JSON-ready facts for the report.
        suffixes: Last parts of names that belong to the format: a tensor with such a name must be used.
    """

    method: str
    recipes: tuple[Recipe, ...]
    dropped: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Base:
    """The stored base model.

    Attributes:
        folder: Its folder.
        config: Its ``config.json``.
        quantization: Its ``quantization_config``; empty when it has none.
        source: Its tensors.
    """

    folder: Path
    config: ModelConfig
    quantization: Mapping[str, Any]
    source: Source

    @cached_property
    def structure(self) -> Structure:
        """The facts that transformers knows about its class."""
        from slipway_prepare.structure import structure

        return structure(self.folder, self.config)

    def half(self, hint: torch.dtype | None = None) -> torch.dtype:
        """Return the 16-bit type of dequantized weights: the configuration's, else that of the scales, else bfloat16."""
        for part in (self.config, self.config.text):
            name = part.get("dtype") or part.get("torch_dtype")
            dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(str(name).removeprefix("torch."))
            if dtype is not None:
                return dtype
        return hint if hint in HALVES else torch.bfloat16

    def modules(self, suffix: str) -> list[str]:
        """Return the names of the modules that store a tensor with this last part of its name, sorted."""
        end = f".{suffix}"
        return sorted(name.removesuffix(end) for name in self.source.tensors if name.endswith(end))

    def part(self, module: str, suffix: str) -> Stored:
        """Return a tensor that a module needs.

        Raises:
            CheckpointValidationError: ``BASE_MODEL_INVALID``.
        """
        name = f"{module}.{suffix}"
        if name not in self.source.tensors:
            raise invalid_error(f"lacks {name!r}, which is needed to dequantize {module}", tensor=name)
        return self.source.tensors[name]

    def optional(self, module: str, suffix: str) -> Stored | None:
        """Return a tensor that a module may have."""
        return self.source.tensors.get(f"{module}.{suffix}")


def check_shape(stored: Stored, *expected: Sequence[int], dtypes: Sequence[torch.dtype] = ()) -> None:
    """Refuse a part whose shape or type is not one its format allows.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    if not any(stored.shape == tuple(shape) for shape in expected):
        wanted = " or ".join(str(tuple(shape)) for shape in expected)
        raise invalid_error(f"has {stored.name!r} of shape {stored.shape}, expected {wanted}", tensor=stored.name)
    if dtypes and stored.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = str(stored.dtype).removeprefix("torch.")
        raise invalid_error(f"has {stored.name!r} of type {actual}, expected {wanted}", tensor=stored.name)


def account(base: Base, made: Dequantized, *, left_out: Sequence[str] = ()) -> tuple[Recipe, ...]:
    """Return all recipes of the result, in the order of the stored tensors; every stored tensor is used exactly once.

    Args:
        base: The stored base model.
        made: What is computed and dropped.
        left_out: Stored names whose tensor is also stored under another name.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` for a part that is used twice or not at all.
    """
    used: dict[str, str] = {}
    for recipe in made.recipes:
        for part in recipe.parts:
            if part in used:
                raise invalid_error(f"has {part!r}, which both {used[part]!r} and {recipe.name!r} need", tensor=part)
            used[part] = recipe.name
    by_first = {min(recipe.parts): recipe for recipe in made.recipes}
    outputs = {recipe.name for recipe in made.recipes}
    recipes: list[Recipe] = []
    for name, stored in sorted(base.source.tensors.items()):
        if name in used:
            recipes += [by_first[name]] if name in by_first else []
        elif name not in made.dropped and name not in left_out:
            if name in outputs:
                raise invalid_error(f"has {name!r} both dense and quantized", tensor=name)
            recipes.append(_copy_recipe(stored, made))
    return tuple(recipes)


def _copy_recipe(stored: Stored, made: Dequantized) -> Recipe:
    last = stored.name.rpartition(".")[2]
    integers = not stored.dtype.is_floating_point and stored.dtype != torch.bool
    if last in made.suffixes or (integers and last == "weight" and len(stored.shape) > 1):
        raise invalid_error(
            f"has {stored.name!r} ({str(stored.dtype).removeprefix('torch.')}), a part of a quantized weight "
            "whose other parts are missing",
            tensor=stored.name,
        )
    if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
        raise invalid_error(f"has the 8-bit tensor {stored.name!r} without a scale", tensor=stored.name)
    return Recipe(stored.name, stored.dtype, stored.shape, (stored.name,))


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
            for block_bytes in write_safetensors(folder, file, by_name, source, check=_check_finite):
                done += block_bytes
                ctx.progress("preparing", done=done, total=total, unit="bytes")
        weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
        if index := index_file(weight_map, total_bytes=total):
            (folder / index[0]).write_text(index[1], encoding="utf-8")
    return total


def write_safetensors(
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
