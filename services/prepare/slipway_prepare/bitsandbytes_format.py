"""Weights as bitsandbytes stores them: 4 bit (NF4, FP4, with or without double quantization), LLM.int8(), and a round trip in NF4.

Source: bitsandbytes 0.50, ``functional.py`` (``QuantState.as_dict``, ``quantize_4bit``, ``dequantize_4bit``, ``create_dynamic_map``),
``backends/default/ops.py``, ``nn/modules.py`` (``Linear8bitLt``); transformers 5, ``quantizers/quantizer_bnb_4bit.py``.

4 bit, of a weight with n elements in blocks of 64: ``weight`` (n/2 bytes, the first element in the high half of each),
``weight.absmax`` (one per block), ``weight.quant_map`` (the 16 values), ``weight.quant_state.bitsandbytes__nf4`` (JSON as bytes).
With double quantization ``absmax`` is one byte per block: ``nested_quant_map[byte] * nested_absmax[block / 256] + nested_offset``.

The round trip is a 16- or 32-bit weight as training with ``load_in_4bit`` used it, as
``functional.quantize_4bit(compress_statistics=True, quant_type="nf4", blocksize=64)`` computes it on a CPU. Each element is
divided by the largest absolute value (absmax) of its block and rounded to the nearest of 16 values. The mean of all absmax is
subtracted from them, and the differences are rounded to 8-bit dynamic values in blocks of 256. A GPU sums that mean in another
order and divides approximately, so there an absmax can differ in its last bit, and an element halfway between two values can be
rounded to the other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipway.files.json_documents import parse_json
from slipway.model.dtypes import DTYPES, torch_dtypes
from slipway_prepare.faults import invalid_error, unsupported_error
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe, check_shape

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
_STATE = "weight.quant_state.bitsandbytes__"
_DTYPES = {DTYPES[name].torch: dtype for name, dtype in torch_dtypes("F32", "F16", "BF16").items()}
_FLOATS = tuple(_DTYPES.values())
#: Number of elements computed at once, a multiple of every block size.
_CHUNK = 1 << 20
_LARGEST_STATE = 1 << 16

BLOCK = 64
NESTED_BLOCK = 256
_TINY = 1e-38  # bitsandbytes' guard for blocks of zeros


def read_bitsandbytes(base: Base) -> Dequantized:
    """Return every weight that bitsandbytes quantized.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    four = [(module, kind) for kind in ("nf4", "fp4") for module in base.modules(f"{_STATE}{kind}")]
    eight = base.modules("SCB")
    states = [_state(base, module, kind) for module, kind in four]
    kinds = sorted({state.kind for state in states} | ({"int8"} if eight else set()))
    nested = sorted({state.nested for state in states})
    return Dequantized(
        method=f"bitsandbytes {'+'.join(kinds) or 'without quantized weights'}",
        recipes=tuple([state.recipe() for state in states] + [_int8(base, module) for module in eight]),
        dropped=tuple(f"{module}.weight_format" for module in eight if base.optional(module, "weight_format")),
        details={"double_quantization": nested == [True]} if states else {},
        suffixes=("SCB", "weight_format", "absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    )


@dataclass(frozen=True)
class _State:
    """The quantization state of one 4-bit weight, checked against the stored tensors."""

    module: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    nested: bool
    nested_block: int
    offset: float

    def recipe(self) -> Recipe:
        """Return the recipe of the dense weight."""
        parts = ["weight", "weight.absmax", "weight.quant_map", f"{_STATE}{self.kind}"]
        if self.nested:
            parts += ["weight.nested_absmax", "weight.nested_quant_map"]
        names = tuple(f"{self.module}.{part}" for part in parts)
        return Recipe(f"{self.module}.weight", self.dtype, self.shape, names, self._build)

    def _build(self, read: Read) -> Tensor:
        name = f"{self.module}.weight"
        absmax = read(f"{name}.absmax")
        if self.nested:
            table, outer = read(f"{name}.nested_quant_map").float(), read(f"{name}.nested_absmax").float()
            absmax = dequantize_blocks(absmax, table, outer, self.nested_block) + torch.tensor(
                self.offset, dtype=torch.float32
            )
        packed = read(name).reshape(-1).view(torch.uint8)
        table = read(f"{name}.quant_map").float()
        values = dequantize_four_bit(
            packed, table, absmax.float(), block=self.block, count=math.prod(self.shape), dtype=self.dtype
        )
        return values.reshape(self.shape)


def dequantize_four_bit(
    packed: Tensor, table: Tensor, absmax: Tensor, *, block: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Return the values of packed 4-bit codes. packed: (count / 2,) uint8; table: (16,); absmax: (blocks,) float32 → (count,)."""
    values = torch.empty(count, dtype=dtype)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        pair = packed[start // 2 : (stop + 1) // 2]
        codes = torch.stack((pair >> 4, pair & 0xF), dim=1).reshape(-1)[: stop - start]
        scale = absmax[start // block : -(-stop // block)].repeat_interleave(block)[: stop - start]
        values[start:stop] = table[codes.long()] * scale
    return values


def dequantize_blocks(codes: Tensor, table: Tensor, absmax: Tensor, block: int) -> Tensor:
    """Return the values of 8-bit codes in blocks. codes: (n,) uint8; table: (256,); absmax: (n / block,) float32 → (n,) float32."""
    return table[codes.long()] * absmax.repeat_interleave(block)[: codes.numel()]


def _state(base: Base, module: str, kind: str) -> _State:
    name = f"{module}.{_STATE}{kind}"
    size = math.prod(base.source.tensors[name].shape)
    if size > _LARGEST_STATE:
        raise invalid_error(f"has a quantization state {name!r} of {size} bytes", tensor=name)
    try:
        said: dict[str, Any] = parse_json(bytes(base.source.read(name).reshape(-1).tolist()))
        state = _State(
            module=module,
            kind=kind,
            shape=tuple(int(size) for size in said["shape"]),
            dtype=_DTYPES[said["dtype"]],
            block=int(said["blocksize"]),
            nested="nested_blocksize" in said,
            nested_block=int(said.get("nested_blocksize", 0)),
            offset=float(said.get("nested_offset", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise invalid_error(f"has an unreadable quantization state {name!r} ({error!r})", tensor=name) from error
    if said.get("quant_type") != kind or not state.shape or min(state.shape) < 1 or not _is_block_size(state.block):
        raise invalid_error(f"has an impossible quantization state {name!r}: {json.dumps(said)[:200]}", tensor=name)
    _check_parts(base, state)
    return state


def _is_block_size(size: int) -> bool:
    return 32 <= size <= 4096 and size & (size - 1) == 0


def _check_parts(base: Base, state: _State) -> None:
    count = math.prod(state.shape)
    blocks = -(-count // state.block)
    weight, absmax = base.part(state.module, "weight"), base.part(state.module, "weight.absmax")
    size = math.prod(weight.shape) * weight.dtype.itemsize
    if size - (count + 1) // 2 not in range(max(weight.dtype.itemsize, 1)):
        raise invalid_error(f"has {weight.name!r} of {size} bytes for {state.shape} in 4 bits", tensor=weight.name)
    check_shape(base.part(state.module, "weight.quant_map"), (16,), dtypes=_FLOATS)
    check_shape(absmax, (blocks,), dtypes=(torch.uint8,) if state.nested else _FLOATS)
    table = base.source.read(f"{state.module}.weight.quant_map").float()
    if state.kind == "nf4" and not torch.allclose(table, torch.tensor(NF4), atol=1e-6):
        raise invalid_error(f"has values other than NF4's in {state.module}.weight.quant_map", tensor=weight.name)
    if state.nested:
        if state.nested_block < 1 or not math.isfinite(state.offset):
            raise invalid_error(f"has an impossible double quantization of {weight.name!r}", tensor=weight.name)
        outer = base.part(state.module, "weight.nested_absmax")
        check_shape(outer, (-(-blocks // state.nested_block),), dtypes=_FLOATS)
        check_shape(base.part(state.module, "weight.nested_quant_map"), (256,), dtypes=_FLOATS)


def _int8(base: Base, module: str) -> Recipe:
    """Return the recipe of an LLM.int8() weight: one int8 per element, ``SCB`` is the largest absolute value of each row."""
    weight, scale = base.part(module, "weight"), base.part(module, "SCB")
    if len(weight.shape) != 2 or min(weight.shape) < 1:
        raise invalid_error(f"has {weight.name!r} of shape {weight.shape}, expected a matrix", tensor=weight.name)
    check_shape(weight, weight.shape, dtypes=(torch.int8,))
    check_shape(scale, (weight.shape[0],), dtypes=_FLOATS)
    layout = base.optional(module, "weight_format")
    if layout is not None and int(base.source.read(layout.name).reshape(-1)[:1].sum()) != 0:
        raise unsupported_error(
            f"has {weight.name!r} in a GPU's own order of rows (weight_format is not 0)", tensor=weight.name
        )
    dtype = base.half()

    def build(read: Read) -> Tensor:
        codes, scales = read(weight.name), read(scale.name).float()
        values = torch.empty(weight.shape, dtype=dtype)
        step = max(1, _CHUNK // weight.shape[1])
        for row in range(0, weight.shape[0], step):
            values[row : row + step] = codes[row : row + step] * scales[row : row + step, None] * _INT8_STEP
        return values

    return Recipe(weight.name, dtype, weight.shape, (weight.name, scale.name), build)


def nf4_round_trip(weight: Tensor) -> Tensor:
    """Return a weight quantized to NF4 and back. weight: (out, in) of any floating-point type → the same shape and type."""
    flat = weight.contiguous().reshape(-1)
    absmax = torch.cat([_absmax(part.float()) for part in flat.split(_CHUNK)])
    scale = _round_trip_absmax(absmax)
    table = torch.tensor(NF4)
    middles = (table[:-1] + table[1:]) / 2
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].float()
        blocks = slice(start // BLOCK, start // BLOCK + -(-part.numel() // BLOCK))
        codes = torch.bucketize(_normalize(part, absmax[blocks]), middles)
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
    largest = part[:full].reshape(-1, BLOCK).abs().amax(dim=1)
    return torch.cat([largest, part[full:].abs().amax().clamp(min=_TINY)[None]]) if full < part.numel() else largest


def _normalize(part: Tensor, absmax: Tensor) -> Tensor:
    """Return elements between -1 and 1. Like bitsandbytes, multiply whole blocks by the reciprocal and divide a shorter last one."""
    full = part.numel() - part.numel() % BLOCK
    whole = absmax[: full // BLOCK].clamp(min=_TINY)
    scaled = (part[:full].reshape(-1, BLOCK) * (1.0 / whole)[:, None]).reshape(-1)
    if full < part.numel():
        scaled = torch.cat([scaled, part[full:] / absmax[-1]])
    return scaled.clamp(-1, 1)


def _spread(scale: Tensor, part: Tensor) -> Tensor:
    return scale.repeat_interleave(BLOCK)[: part.numel()]


def _round_trip_absmax(absmax: Tensor) -> Tensor:
    offset = absmax.mean()
    table = dynamic_map()
    middles = (table[:-1] + table[1:]) / 2
    rest = absmax - offset
    outer = torch.stack([part.abs().amax() for part in rest.split(NESTED_BLOCK)])
    scaled = rest * (1.0 / outer.clamp(min=_TINY)).repeat_interleave(NESTED_BLOCK)[: rest.numel()]
    codes = torch.bucketize(scaled.clamp(-1, 1), middles).to(torch.uint8)
    return dequantize_blocks(codes, table, outer, NESTED_BLOCK) + offset
