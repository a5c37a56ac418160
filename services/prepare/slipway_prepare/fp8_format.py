"""Weights in 8-bit floats (E4M3, E5M2): with one scale, one per row, one per block of rows and columns, or none.

Weights are multiplied by their scales. Source: transformers 5, ``integrations/finegrained_fp8.py`` (``Fp8Dequantize``: ``weight_scale_inv``, blocks of
128 × 128, the last of which may be shorter, scales as floats or as bare exponents) and ``integrations/fbgemm_fp8.py``
(``weight_scale`` of (out, 1)); the names are DeepSeek-V3's and Qwen3-FP8's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_prepare.faults import invalid_error, unsupported_error
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe
from slipway_prepare.source import Stored

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: A weight's scale has its name and one of these endings (``weight_scale_inv``, ``gate_up_proj_scale_inv``).
_SCALES = ("_scale_inv", "_scale")
#: Scales of activations and of the KV cache: they matter only when computing in 8 bits.
_ACTIVATION = ("activation_scale", "input_scale", "input_scale_ub", "k_scale", "v_scale")
_DEFAULT_BLOCK = (128, 128)
#: Number of elements computed at once.
_CHUNK = 1 << 20


def read_fp8(base: Base) -> Dequantized:
    """Return every weight in 8-bit floats.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    if base.quantization.get("expert_dtype") == "fp4":
        raise unsupported_error("has experts in 4-bit floats (expert_dtype fp4)", expert_dtype="fp4")
    stored = [tensor for _, tensor in sorted(base.source.tensors.items()) if tensor.dtype in _FP8]
    made = tuple(_recipe(base, tensor) for tensor in stored)
    dropped = [name for name in base.source.tensors if name.rpartition(".")[2] in _ACTIVATION]
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored})
    unscaled = sum(len(recipe.parts) == 1 for recipe in made)
    return Dequantized(
        "fp8",
        made,
        dropped=tuple(sorted(dropped)),
        details={"types": types, "without_scale": unscaled, "block": list(_block(base)) if base.quantization else None},
        suffixes=tuple(f"weight{ending}" for ending in _SCALES),
    )


def _recipe(base: Base, weight: Stored) -> Recipe:
    scales = [base.source.tensors[name] for s in _SCALES if (name := weight.name + s) in base.source.tensors]
    dtype = base.half()
    if not scales:
        if base.quantization:
            raise invalid_error(f"has the 8-bit tensor {weight.name!r} without its scale", tensor=weight.name)
        return Recipe(weight.name, dtype, weight.shape, (weight.name,), lambda read: read(weight.name).to(dtype))
    if len(scales) > 1:
        raise invalid_error(
            f"has two scales of {weight.name!r}: {scales[0].name!r} and {scales[1].name!r}", tensor=weight.name
        )
    scale = scales[0]
    if not scale.dtype.is_floating_point and base.quantization.get("scale_fmt") != "ue8m0":
        raise invalid_error(f"has {scale.name!r} as integers", tensor=scale.name)
    block = _spans(base, weight, scale)

    def build(read: Read) -> Tensor:
        grid = _floats(read(scale.name))
        codes, values = read(weight.name), torch.empty(weight.shape, dtype=dtype)
        if block is None:
            flat, out = codes.reshape(-1), values.reshape(-1)
            for start in range(0, flat.numel(), _CHUNK):
                out[start : start + _CHUNK] = flat[start : start + _CHUNK].float() * grid.reshape(())
            return values
        grid = grid.reshape(-(-weight.shape[0] // block[0]), -1)
        for row in range(0, weight.shape[0], block[0]):
            factor = grid[row // block[0]].repeat_interleave(block[1])[: weight.shape[1]]
            values[row : row + block[0]] = codes[row : row + block[0]].float() * factor
        return values

    return Recipe(weight.name, dtype, weight.shape, (weight.name, scale.name), build)


def _floats(scales: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents (ue8m0)."""
    return (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()


def _block(base: Base) -> tuple[int, int]:
    size = base.quantization.get("weight_block_size") or _DEFAULT_BLOCK
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise invalid_error(f"has an impossible weight_block_size in config.json: {size!r}", weight_block_size=size)
    return size[0], size[1]


def _spans(base: Base, weight: Stored, scale: Stored) -> tuple[int, int] | None:
    """Return the number of rows and columns that share a scale; None if all elements share one.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    if len(scale.shape) <= 2 and all(size == 1 for size in scale.shape):
        return None
    if len(weight.shape) != 2 or min(weight.shape) < 1:
        raise invalid_error(f"has {scale.name!r} of shape {scale.shape} for {weight.shape}", tensor=scale.name)
    rows, columns = weight.shape
    if scale.shape in ((rows,), (rows, 1)) and scale.name.endswith("weight_scale"):
        return 1, columns
    height, width = _block(base)
    if scale.shape == (-(-rows // height), -(-columns // width)):
        return height, width
    raise invalid_error(
        f"has {scale.name!r} of shape {scale.shape} for a weight of {weight.shape} in blocks of {height} × {width}",
        tensor=scale.name,
    )
