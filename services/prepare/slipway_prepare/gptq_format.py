"""Weights as GPTQ and AWQ store them: integers of 2, 4 or 8 bits in 32-bit words, with a zero point and a scale per group.

For a weight of shape (out, in), both formats have ``scales`` (groups, out) and ``qzeros`` (groups, out · bits / 32); a word of ``qzeros``
packs neighbouring columns. The value is ``scales[g] * (q - zeros[g])``, where g is the group of the input column.

GPTQ: ``qweight`` (in · bits / 32, out), packed along the input; ``g_idx`` (in) names each column's group (``desc_act`` sorts columns by
activation). The ``gptq`` format (v1) stores zero points minus one, subtracted from whole words; ``gptq_v2`` stores them unchanged.
Source: gptqmodel 7.7, ``nn_modules/qlinear`` (``dequantize_weight``), ``utils/model.py`` (``convert_gptq_v1_to_v2_format_module``).

AWQ (``gemm``): ``qweight`` (in, out / 8), packed along the output, 4 bits, columns of a word in the order 0 2 4 6 1 3 5 7.
Source: autoawq 0.2.9, ``utils/packing_utils.py`` (``unpack_awq``, ``reverse_awq_order``, ``dequantize_gemm``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipway_prepare.faults import invalid_error, unsupported_error
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe, check_shape
from slipway_prepare.source import Stored

_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each column in its word: the inverse of the order 0 2 4 6 1 3 5 7."""
#: Number of elements computed at once.
_CHUNK = 1 << 20


def read_gptq(base: Base) -> Dequantized:
    """Return every weight that GPTQ quantized.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    settings = base.quantization
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2"):
        raise unsupported_error(
            f"is in the GPTQ checkpoint format {version!r}; gptq and gptq_v2 are read", checkpoint_format=version
        )
    made = [_gptq(base, module, first_zero=1 if version == "gptq" else 0) for module in base.modules("qweight")]
    details = {"bits": settings.get("bits"), "group_size": settings.get("group_size"), "checkpoint_format": version}
    return Dequantized(
        "gptq", tuple(made), details=details | {"desc_act": bool(settings.get("desc_act"))}, suffixes=_SUFFIXES
    )


def read_awq(base: Base) -> Dequantized:
    """Return every weight that AWQ quantized.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    settings = base.quantization
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise unsupported_error(
            f"is in the AWQ format {version!r} of {bits} bits; gemm of 4 bits is read", version=version
        )
    made = tuple(_awq(base, module) for module in base.modules("qweight"))
    details = {"bits": bits, "group_size": settings.get("group_size", settings.get("q_group_size"))}
    return Dequantized("awq", made, details=details, suffixes=_SUFFIXES)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Return codes packed along the first axis. words: (n, m) int32 → (n · 32 / bits, m) int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[:, None, :] >> shifts[None, :, None]) & ((1 << bits) - 1)
    return codes.reshape(-1, words.shape[1])


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Return codes packed along the last axis. words: (n, m) int32 → (n, m · 32 / bits) int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(words.shape[0], -1)


def awq_order(codes: Tensor) -> Tensor:
    """Return the columns of unpacked AWQ words in the weight's order. codes: (n, m)."""
    return codes.reshape(codes.shape[0], -1, 8)[:, :, list(_AWQ_PLACES)].reshape(codes.shape)


def _gptq(base: Base, module: str, *, first_zero: int) -> Recipe:
    qweight, scales, qzeros = (base.part(module, name) for name in ("qweight", "scales", "qzeros"))
    g_idx = base.optional(module, "g_idx")
    groups, outputs = _scales(scales)
    inputs = g_idx.shape[0] if g_idx is not None and len(g_idx.shape) == 1 else _inputs(base, groups, qweight.name)
    bits = 32 * qweight.shape[0] // inputs if len(qweight.shape) == 2 and inputs else 0
    if bits not in (2, 4, 8) or qweight.shape[0] * 32 != inputs * bits:
        raise unsupported_error(
            f"has {qweight.name!r} of shape {qweight.shape} for {inputs} inputs: 2, 4 and 8 bits are read"
        )
    if outputs * bits % 32:
        raise invalid_error(
            f"has {outputs} outputs in {qweight.name!r}, so its zero points do not fill whole words",
            tensor=qweight.name,
        )
    check_shape(qweight, (inputs * bits // 32, outputs), dtypes=(torch.int32,))
    check_shape(qzeros, (groups, outputs * bits // 32), dtypes=(torch.int32,))
    names = [qweight.name, qzeros.name, scales.name]
    if g_idx is not None:
        check_shape(g_idx, (inputs,), dtypes=(torch.int32, torch.int64))
        names.append(g_idx.name)

    def group_of(read: Read) -> Tensor:
        if g_idx is None:
            size = base.quantization["group_size"]
            return torch.arange(inputs) // (size if size > 0 else inputs)
        indices = read(g_idx.name).long()
        if int(indices.min()) < 0 or int(indices.max()) >= groups:
            raise invalid_error(f"has group numbers outside 0…{groups - 1} in {g_idx.name!r}", tensor=g_idx.name)
        return indices

    step = sum(1 << shift for shift in range(0, 32, bits)) * first_zero

    def zeros(read: Read) -> Tensor:
        # A carry goes into the next zero point, as a borrow did when ones were subtracted.
        stored = read(qzeros.name).long() + step
        return unpack_columns(((stored + (1 << 31)) % (1 << 32) - (1 << 31)).int(), bits)

    def codes(read: Read, first: int, last: int) -> Tensor:
        return unpack_rows(read(qweight.name)[first * bits // 32 : last * bits // 32], bits)

    build = _builder(
        (inputs, outputs), scales.name, base.half(scales.dtype), group_of=group_of, zeros=zeros, codes=codes
    )
    return Recipe(f"{module}.weight", base.half(scales.dtype), (outputs, inputs), tuple(names), build)


def _awq(base: Base, module: str) -> Recipe:
    qweight, scales, qzeros = (base.part(module, name) for name in ("qweight", "scales", "qzeros"))
    groups, outputs = _scales(scales)
    inputs = qweight.shape[0] if qweight.shape else 0
    if inputs % groups or outputs % 8:
        raise invalid_error(
            f"has {scales.name!r} of {groups} groups for {inputs} inputs and {outputs} outputs", tensor=scales.name
        )
    check_shape(qweight, (inputs, outputs // 8), dtypes=(torch.int32,))
    check_shape(qzeros, (groups, outputs // 8), dtypes=(torch.int32,))
    build = _builder(
        (inputs, outputs),
        scales.name,
        base.half(scales.dtype),
        group_of=lambda read: torch.arange(inputs) // (inputs // groups),  # noqa: ARG005
        zeros=lambda read: awq_order(unpack_columns(read(qzeros.name), 4)),
        codes=lambda read, first, last: awq_order(unpack_columns(read(qweight.name)[first:last], 4)),
    )
    names = (qweight.name, qzeros.name, scales.name)
    return Recipe(f"{module}.weight", base.half(scales.dtype), (outputs, inputs), names, build)


def _builder(
    shape: tuple[int, int],
    scales_name: str,
    dtype: torch.dtype,
    *,
    group_of: Callable[[Read], Tensor],
    zeros: Callable[[Read], Tensor],
    codes: Callable[[Read, int, int], Tensor],
) -> Callable[[Read], Tensor]:
    """Return a function that computes ``scales[g] * (q - zeros[g])`` in float32, some input columns at a time, and rounds once."""
    inputs, outputs = shape

    def build(read: Read) -> Tensor:
        group, scales, zero = group_of(read), read(scales_name).float(), zeros(read)
        weight = torch.empty((inputs, outputs), dtype=dtype)
        step = max(32, _CHUNK // outputs // 32 * 32)
        for first in range(0, inputs, step):
            last = min(first + step, inputs)
            part = group[first:last]
            weight[first:last] = scales[part] * (codes(read, first, last) - zero[part])
        return weight.T

    return build


def _scales(stored: Stored) -> tuple[int, int]:
    """Return the number of groups and outputs by the shape of the scales."""
    if len(stored.shape) != 2 or min(stored.shape) < 1:
        raise invalid_error(
            f"has {stored.name!r} of shape {stored.shape}, expected (groups, outputs)", tensor=stored.name
        )
    check_shape(stored, stored.shape, dtypes=_FLOATS)
    return stored.shape[0], stored.shape[1]


def _inputs(base: Base, groups: int, name: str) -> int:
    """Return the number of input columns by the configured group size, for files without ``g_idx``."""
    size, bits = base.quantization.get("group_size"), base.quantization.get("bits")
    words = next(iter(base.source.tensors[name].shape), 0)
    if not isinstance(bits, int) or not isinstance(size, int) or bits not in (2, 4, 8):
        raise unsupported_error(f"has {name!r} without g_idx, and bits {bits!r} with group_size {size!r}", tensor=name)
    inputs = words * 32 // bits
    if inputs < 1 or -(-inputs // (size if size > 0 else inputs)) != groups:
        raise invalid_error(f"has {name!r} with {groups} groups for {inputs} inputs of group_size {size}", tensor=name)
    return inputs
