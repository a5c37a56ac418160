"""8 bits of a weight with one scale per output feature, for kernels that multiply activations of 8 bits by the weights.

Axes: N output features, K input features, R some of the N.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.model.dtypes import torch_dtypes
from slipway_quantize.forms.form import Form, Part, StoredRows
from slipway_quantize.forms.tensors import as_bytes, squares_of
from slipway_quantize.grid.rounding import overflow_error
from slipway_quantize.model_weights import as_array, as_tensor, require_finite

_LARGEST = {"F8_E4M3": 448.0, "I8": 127.0}


class Channels(Form):
    """Weights in FP8 (E4M3) or int8; the scale of a row takes its largest weight to the largest code.

    Args:
        dtype: ``F8_E4M3`` or ``I8``.
        scale_dtype: Type of the scales, by its name in a safetensors header: the model's own, in which compressed-tensors loads them.
        ranges: Largest input of each layer; None: each token's own range is measured while the model runs.
    """

    def __init__(self, dtype: str, *, scale_dtype: str, ranges: Mapping[str, float] | None = None) -> None:
        self._dtype, self._scale_dtype = dtype, scale_dtype
        self._torch = torch_dtypes(dtype, scale_dtype)
        self._ranges = ranges
        integer = dtype == "I8"
        self.format = "int-quantized" if integer else "float-quantized"
        plain = {"num_bits": 8, "type": "int" if integer else "float", "symmetric": True}
        self.weights = {**plain, "strategy": "channel", "dynamic": False}
        dynamic = ranges is None
        self.activations = {**plain, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:  # noqa: ARG002 - the same for all
        """As :meth:`Form.parts`."""
        parts: dict[str, Part] = {
            "weight": (self._dtype, shape),
            "weight_scale": (self._scale_dtype, (shape[0], 1)),
        }
        return parts if self._ranges is None else parts | {"input_scale": (self._scale_dtype, (1,))}

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:  # noqa: ARG002 - of any shape
        """As :meth:`Form.whole`."""
        if self._ranges is None:
            return {}
        return {"input_scale": as_bytes(self._scale(torch.tensor([self._ranges[module]]), module))}

    def round_rows(self, weight: NDArray[Any], row: int, *, module: str, name: str) -> StoredRows:  # noqa: ARG002 - any row
        """As :meth:`Form.round_rows`."""
        require_finite(weight, name)
        exact = as_tensor(weight).float()
        scale = self._scale(exact.abs().amax(dim=1, keepdim=True), name)  # (R, 1)
        largest, wide = _LARGEST[self._dtype], scale.float()
        scaled = (exact / wide).clamp_(-largest, largest)
        codes = (scaled.round_() if self._dtype == "I8" else scaled).to(self._torch[self._dtype])
        values = codes.float() * wide
        parts = {"weight": as_bytes(codes), "weight_scale": as_bytes(scale)}
        return StoredRows(parts, values.numpy, squares_of(exact, values))

    def _scale(self, largest: Tensor, name: str) -> Tensor:
        """Return the scales at which float32 magnitudes become the largest code; never 0, because weights are divided by them."""
        dtype = self._torch[self._scale_dtype]
        scale = (largest / _LARGEST[self._dtype]).to(dtype)
        if not bool(torch.isfinite(scale).all()):
            raise overflow_error(largest.numpy(), np.atleast_1d(as_array(scale)), name)
        return scale.clamp_(min=torch.finfo(dtype).tiny)
