"""A 16- or 32-bit weight as training with ``load_in_4bit`` used it: quantized to NF4 with double quantization and back.

Source: bitsandbytes 0.50, ``functional.quantize_4bit(compress_statistics=True, quant_type="nf4", blocksize=64)`` on a CPU. Each element is
divided by the largest absolute value (absmax) of its block and rounded to the nearest of 16 values. The mean of all absmax is
subtracted from them, and the differences are rounded to 8-bit dynamic values in blocks of 256. A GPU sums that mean in another order and
divides approximately, so there an absmax can differ in its last bit, and an element halfway between two values can be rounded to the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_prepare.bitsandbytes_format import NF4, blockwise

BLOCK = 64
NESTED_BLOCK = 256
_CHUNK = 1 << 20
_TINY = 1e-38  # bitsandbytes' guard for blocks of zeros


def nf4_round_trip(weight: Tensor) -> Tensor:
    """Return a weight quantized to NF4 and back. weight: (out, in) of any floating-point type → the same shape and type."""
    flat = weight.contiguous().reshape(-1)
    absmax = torch.cat([_absmax(part.float()) for part in flat.split(_CHUNK)])
    scale = _double_quantized(absmax)
    table = torch.tensor(NF4)
    middles = (table[:-1] + table[1:]) / 2
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].float()
        blocks = slice(start // BLOCK, start // BLOCK + -(-part.numel() // BLOCK))
        codes = torch.bucketize(_normalized(part, absmax[blocks]), middles)
        out[start : start + _CHUNK] = table[codes] * _spread(scale[blocks], part)
    return out.reshape(weight.shape)


def dynamic_map() -> Tensor:
    """Return the 256 values of the signed 8-bit dynamic type: ``create_dynamic_map()`` of bitsandbytes; arXiv 1511.04561."""
    values: list[float] = []
    for exponent in range(7):
        boundaries = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        power: float = 10 ** (exponent - 6)
        values += (power * means).tolist() + (-power * means).tolist()
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32)


def _absmax(part: Tensor) -> Tensor:
    full = part.numel() - part.numel() % BLOCK
    found = part[:full].reshape(-1, BLOCK).abs().amax(dim=1)
    return torch.cat([found, part[full:].abs().amax().clamp(min=_TINY)[None]]) if full < part.numel() else found


def _normalized(part: Tensor, absmax: Tensor) -> Tensor:
    """Return elements between -1 and 1. Like bitsandbytes, multiply whole blocks by the reciprocal and divide a shorter last one."""
    full = part.numel() - part.numel() % BLOCK
    whole = absmax[: full // BLOCK].clamp(min=_TINY)
    scaled = (part[:full].reshape(-1, BLOCK) * (1.0 / whole)[:, None]).reshape(-1)
    if full < part.numel():
        scaled = torch.cat([scaled, part[full:] / absmax[-1]])
    return scaled.clamp(-1, 1)


def _spread(scale: Tensor, part: Tensor) -> Tensor:
    return scale.repeat_interleave(BLOCK)[: part.numel()]


def _double_quantized(absmax: Tensor) -> Tensor:
    offset = absmax.mean()
    table = dynamic_map()
    middles = (table[:-1] + table[1:]) / 2
    rest = absmax - offset
    outer = torch.stack([part.abs().amax() for part in rest.split(NESTED_BLOCK)])
    scaled = rest * (1.0 / outer.clamp(min=_TINY)).repeat_interleave(NESTED_BLOCK)[: rest.numel()]
    codes = torch.bucketize(scaled.clamp(-1, 1), middles).to(torch.uint8)
    return blockwise(codes, table, outer, NESTED_BLOCK) + offset
