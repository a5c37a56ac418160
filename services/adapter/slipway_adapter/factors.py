"""Bring factors into a form that every server reads: one rank, one plain scaling, one type.

Axes: r = rank of a pair, R = rank of the output, d_in and d_out = features of the module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipway.errors import AdapterExportError
from slipway.model.adapters.saved import Pair
from slipway.model.dtypes import FLOATS, numpy_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import mapped
from slipway_adapter.params import FactorType

Array = np.ndarray[Any, np.dtype[Any]]

_NAMES: Mapping[FactorType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Form:
    """The form of all pairs, or of one.

    Attributes:
        rank: Rank, R.
        alpha: ``lora_alpha``; the update is ``alpha / R · B @ A``.
        folded: Whether the pair's own scaling is multiplied into its B, so that ``alpha / R`` is 1.
        dtype: Safetensors name of the type.
    """

    rank: int
    alpha: float
    folded: bool
    dtype: str


def common_form(pairs: Sequence[Pair], dtype: FactorType = "auto") -> Form:
    """Choose the form that changes the pairs least.

    The scaling stays in ``lora_alpha`` if it is the same for all pairs and alpha is whole. Otherwise it is multiplied into B. That rounds a
    16-bit B unless the scaling is a power of two, so ``auto`` then widens to float32.

    Raises:
        AdapterExportError: ``DTYPE_UNSUPPORTED``.
    """
    stored = _stored_types(pairs)
    rank = max(pair.rank for pair in pairs)
    scalings = sorted({pair.scaling for pair in pairs})
    alpha = scalings[0] * rank
    folded = len(scalings) > 1 or alpha != round(alpha)
    if dtype != "auto":
        name = _NAMES[dtype]
    else:
        exact = not folded or all(abs(math.frexp(scaling)[0]) == 0.5 for scaling in scalings)  # powers of two
        name = stored.pop() if len(stored) == 1 and exact and "F64" not in stored else "F32"
    return Form(rank, rank if folded else round(alpha), folded, name)


def own_form(pair: Pair) -> Form:
    """Return the form in which a pair is stored, without padding or multiplying; its reader must know each module's rank and scaling.

    Raises:
        AdapterExportError: ``DTYPE_UNSUPPORTED``.
    """
    stored = _stored_types([pair])
    alpha = pair.scaling * pair.rank
    dtype = stored.pop() if len(stored) == 1 and "F64" not in stored else "F32"
    return Form(pair.rank, round(alpha) if alpha == round(alpha) else alpha, folded=False, dtype=dtype)


def _stored_types(pairs: Sequence[Pair]) -> set[str]:
    stored = {info.dtype for pair in pairs for info in (pair.a, pair.b)}
    strange = sorted(stored - set(FLOATS))
    if strange:
        raise AdapterExportError(
            f"the adapter's factors have the type {strange[0]}",
            reason="DTYPE_UNSUPPORTED",
            remedy="save the adapter in float32, bfloat16 or float16",
        )
    return stored


def normalize(pair: Pair, form: Form) -> tuple[Array, Array]:
    """Return A (R, d_in) and B (d_out, R) of a pair in a form; rows and columns beyond its own rank are zero.

    Raises:
        AdapterExportError: ``NON_FINITE_WEIGHTS``.
    """
    dtype = numpy_dtypes(form.dtype)[form.dtype]
    a, b = mapped(pair.a), mapped(pair.b)
    if form.folded:
        b = b.astype(np.float64) * pair.scaling
    padded_a = np.zeros((form.rank, a.shape[1]), dtype)
    padded_b = np.zeros((b.shape[0], form.rank), dtype)
    with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
        padded_a[: pair.rank], padded_b[:, : pair.rank] = a.astype(dtype), b.astype(dtype)
    for info, values in ((pair.a, padded_a), (pair.b, padded_b)):
        if not np.isfinite(values.astype(np.float32)).all():
            raise _not_finite_error(info, form.dtype)
    return padded_a, padded_b


def scale(pair: Pair) -> tuple[Array, Array]:
    """Return A (r, d_in) and scaling · B (d_out, r) of a pair in float32.

    Raises:
        AdapterExportError: ``NON_FINITE_WEIGHTS``.
    """
    return normalize(pair, Form(pair.rank, pair.rank, folded=True, dtype="F32"))


def find_differing(tensors: Mapping[str, tuple[TensorInfo, TensorInfo | None]]) -> Iterator[str]:
    """Yield the names of saved tensors whose values are not the base's."""
    for name, (saved, base) in tensors.items():
        if base is None or base.shape != saved.shape or not _are_equal(saved, base):
            yield name


def _are_equal(saved: TensorInfo, base: TensorInfo) -> bool:
    ours, theirs = mapped(saved), mapped(base)
    step = max(1, (1 << 22) // max(1, math.prod(saved.shape[1:])))
    return all(
        np.array_equal(ours[row : row + step].astype(np.float64), theirs[row : row + step].astype(np.float64))
        for row in range(0, len(ours), step)
    )


def _not_finite_error(info: TensorInfo, dtype: str) -> AdapterExportError:
    return AdapterExportError(
        f"the adapter's {info.name!r} holds NaN or infinity, or values beyond {dtype}",
        reason="NON_FINITE_WEIGHTS",
        remedy="use an earlier checkpoint, or deliver the factors in float32",
        about={"tensor": info.name},
    )
