"""Integers with a scale per group, packed into words (``pack-quantized``), or of 8 with one per output feature.

A scale per output feature is for kernels that multiply activations of 8 bits by the weights.

Axes: N output features, K input features, R some of the N, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.model.dtypes import numpy_dtypes
from slipway_quantize.calibrated import CalibratedWeight
from slipway_quantize.forms.form import Form, Part, StoredRows, as_bytes, squares_of
from slipway_quantize.grid.rounding import overflow_error, round_weight
from slipway_quantize.grid.search import pack_words
from slipway_quantize.levels import IntLevel
from slipway_quantize.model_weights import DTYPE_NAMES, as_array, require_finite

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_STORED_AS = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}


class PackedIntegers(Form):
    """Integers, chosen by a calibration or rounded to the nearest.

    Args:
        level: Bits and groups.
        scale_dtype: Type of the scales.
        calibrated: Integers that a calibration has chosen, by module.
        asymmetric: Whether weights of the level's own bits have zero points; wider ones have none.
        bits: Bits of weights, by module; the others have those of their calibration, or of the level.

    Attributes:
        level: As above.
        calibrated: As above, without weights that get other bits than their integers have.
    """

    format = "pack-quantized"

    def __init__(
        self,
        level: IntLevel,
        *,
        scale_dtype: torch.dtype,
        calibrated: Mapping[str, CalibratedWeight],
        asymmetric: bool,
        bits: Mapping[str, int] | None = None,
    ) -> None:
        self.level = level
        own = {module: given.bits for module, given in calibrated.items()} | dict(bits or {})
        self._bits = {module: width for module, width in own.items() if width != level.bits}
        self.calibrated = {module: given for module, given in calibrated.items() if given.bits == own[module]}
        self._scale_dtype, self._scales = scale_dtype, DTYPE_NAMES[scale_dtype]
        self._asymmetric = asymmetric
        # compressed-tensors 0.20 expects unpacked zero points in a model that it unpacks later.
        self.dequantize = asymmetric
        self.weights = self._weights(level.bits)

    @property
    def bits(self) -> Mapping[str, int]:
        """Bits of the weights whose bits differ from the level's, by module."""
        return self._bits

    def with_bits(self, bits: Mapping[str, int]) -> PackedIntegers:
        """Return this form with other bits for some weights, by module."""
        return PackedIntegers(
            self.level,
            scale_dtype=self._scale_dtype,
            calibrated=self.calibrated,
            asymmetric=self._asymmetric,
            bits=bits,
        )

    def schemes(self) -> list[tuple[list[str], Mapping[str, Any]]]:
        """As :meth:`Form.schemes`: weights of other bits are named, because a layer takes its most exact target.

        The widest come first, because compressed-tensors warns of a name that follows a class it matches too.
        """
        targets = {self.level.bits: ["Linear"]}
        for module, bits in sorted(self._bits.items()):
            targets.setdefault(bits, []).append(module)
        return [(named, self._weights(bits)) for bits, named in sorted(targets.items(), reverse=True)]

    def _weights(self, bits: int) -> dict[str, Any]:
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": not self._has_zeros(bits),
            "strategy": "group",
            "group_size": self.level.group_size,
            "dynamic": False,
        }

    def _has_zeros(self, bits: int) -> bool:
        return self._asymmetric and bits == self.level.bits

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """As :meth:`Form.parts`."""
        (rows, columns), bits = shape, self._bits.get(module, self.level.bits)
        groups = columns // self.level.group_size
        parts: dict[str, Part] = {
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": (self._scales, (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        return parts | (
            {"weight_zero_point": ("I32", (-(-rows * bits // 32), groups))} if self._has_zeros(bits) else {}
        )

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """As :meth:`Form.whole`: the shape, and zero points, which are packed along the rows and 0 for a weight without."""
        parts: dict[str, NDArray[Any]] = {"weight_shape": np.array(shape, np.int64)}
        if self._has_zeros(bits := self._bits.get(module, self.level.bits)):
            given = self.calibrated.get(module)
            zeros = given.zero_points() if given is not None else None
            if zeros is None:
                zeros = np.zeros((shape[0], shape[1] // self.level.group_size), np.int8)
            parts["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits=bits).T)
        return parts

    def round_rows(self, weight: Tensor, row: int, *, module: str, name: str) -> StoredRows:
        """As :meth:`Form.round_rows`."""
        bits, scale_dtype = self._bits.get(module, self.level.bits), numpy_dtypes(self._scales)[self._scales]
        given, exact = self.calibrated.get(module), as_array(weight)
        if given is not None:
            rows = given.round(exact, row, scale_dtype=scale_dtype, name=f"{module}.weight")
        else:
            rows = round_weight(exact, bits=bits, group_size=self.level.group_size, scale_dtype=scale_dtype, name=name)
        parts = {"weight_packed": rows.packed, "weight_scale": rows.scales}
        return StoredRows(parts, lambda: torch.from_numpy(rows.values(bits)), (rows.error, rows.energy))


class Channels(Form):
    """Weights in FP8 (E4M3) or int8; the scale of a row takes its largest weight to the largest code.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.int8``.
        scale_dtype: Type of the scales: the model's own, in which compressed-tensors loads them.
        ranges: Largest input of each layer; None: each token's own range is measured while the model runs.
    """

    def __init__(
        self, dtype: torch.dtype, *, scale_dtype: torch.dtype, ranges: Mapping[str, float] | None = None
    ) -> None:
        self._dtype = dtype
        self._scale_dtype = scale_dtype
        self._ranges = ranges
        integer = dtype is torch.int8
        self.format = "int-quantized" if integer else "float-quantized"
        plain = {"num_bits": 8, "type": "int" if integer else "float", "symmetric": True}
        self.weights = {**plain, "strategy": "channel", "dynamic": False}
        dynamic = ranges is None
        self.activations = {**plain, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:  # noqa: ARG002 - the same for all
        """As :meth:`Form.parts`."""
        scale = DTYPE_NAMES[self._scale_dtype]
        parts: dict[str, Part] = {"weight": (_STORED_AS[self._dtype], shape), "weight_scale": (scale, (shape[0], 1))}
        return parts if self._ranges is None else parts | {"input_scale": (scale, (1,))}

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:  # noqa: ARG002 - of any shape
        """As :meth:`Form.whole`."""
        if self._ranges is None:
            return {}
        return {"input_scale": as_bytes(self._scale(torch.tensor([self._ranges[module]]), module))}

    def round_rows(self, weight: Tensor, row: int, *, module: str, name: str) -> StoredRows:  # noqa: ARG002 - any row
        """As :meth:`Form.round_rows`."""
        require_finite(weight, name)
        exact = weight.float()
        scale = self._scale(exact.abs().amax(dim=1, keepdim=True), name)  # (R, 1)
        largest, wide = _LARGEST[self._dtype], scale.float()
        scaled = (exact / wide).clamp_(-largest, largest)
        codes = (scaled.round_() if self._dtype is torch.int8 else scaled).to(self._dtype)
        values = codes.float() * wide
        parts = {"weight": as_bytes(codes), "weight_scale": as_bytes(scale)}
        return StoredRows(parts, lambda: values, squares_of(exact, values))

    def _scale(self, largest: Tensor, name: str) -> Tensor:
        """Return the scales at which float32 magnitudes become the largest code; never 0, because weights are divided by them."""
        scale = (largest / _LARGEST[self._dtype]).to(self._scale_dtype)
        if not bool(torch.isfinite(scale).all()):
            raise overflow_error(largest.numpy(), np.atleast_1d(as_array(scale)), name)
        return scale.clamp_(min=torch.finfo(self._scale_dtype).tiny)
