"""Experts as gpt-oss stores them: 4-bit floats (E2M1), 32 of which share a power of two (E8M0).

A stack ``gate_up_proj`` of shape (experts, in, out) is stored as ``gate_up_proj_blocks`` (experts, out, in / 32, 16), bytes of two codes, the lower
half first, and ``gate_up_proj_scales`` (experts, out, in / 32). The value is ``E2M1[code] · 2^(scale − 127)``; a scale of 255 is no number. Sources: OCP
Microscaling Formats 1.0, sections 5.3.3 and 5.4.1, and transformers 5, ``integrations/mxfp4.py`` (``convert_moe_packed_tensors``), for the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_prepare.faults import unsupported_error
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe, check_shape

_MODEL_TYPE = "gpt_oss"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
"""Values that share a scale."""
_BYTES = _GROUP // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NO_NUMBER = 255


def read_mxfp4(base: Base) -> Dequantized:
    """Return every stack of experts that is stored in 4-bit floats.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    kind = base.config.get("model_type")
    if kind != _MODEL_TYPE:  # others may store their weights in another order, which shapes need not show
        raise unsupported_error(f"is a {kind!r} in MXFP4; {_MODEL_TYPE} is read", model_type=kind)
    parts = [(name, end) for name in base.source.tensors for end in (_BLOCKS, _SCALES) if name.endswith(end)]
    stacks = sorted({name.removesuffix(end) for name, end in parts})
    made = tuple(_recipe(base, name) for name in stacks)
    suffixes = {name.rpartition(".")[2] + ending for name in stacks for ending in (_BLOCKS, _SCALES)}
    return Dequantized("mxfp4", made, details={"group_size": _GROUP}, suffixes=tuple(sorted(suffixes)))


def _recipe(base: Base, name: str) -> Recipe:
    owner, _, parameter = name.rpartition(".")
    blocks, scales = (base.part(owner, parameter + ending) for ending in (_BLOCKS, _SCALES))
    experts, rows, groups = (*blocks.shape, 0, 0, 0)[:3]
    check_shape(blocks, (experts, rows, groups, _BYTES), dtypes=(torch.uint8,))
    check_shape(scales, (experts, rows, groups), dtypes=(torch.uint8,))
    dtype, columns = base.half(), groups * _GROUP

    def build(read: Read) -> Tensor:
        codes, exponents = read(blocks.name), read(scales.name)
        weight = torch.empty((experts, columns, rows), dtype=dtype)
        for expert in range(experts):
            weight[expert] = dequantize(codes[expert], exponents[expert]).T
        return weight

    return Recipe(name, dtype, (experts, columns, rows), (blocks.name, scales.name), build)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of one matrix in float32. blocks: (rows, groups, 16), scales: (rows, groups) → (rows, groups · 32)."""
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # (rows, groups, 32)
    values = torch.ldexp(table[codes.int()], scales[..., None].int() - 127)
    values = torch.where(scales[..., None] == _NO_NUMBER, torch.nan, values)
    return values.flatten(-2)
