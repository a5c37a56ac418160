"""4-bit floats (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6) with a short scale per group: MXFP4 and NVFP4, of weights alone.

Axes: N output features, K input features, R some of the N, G groups of a row, S weights of a group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway_quantize.forms.form import FLOAT_GROUPS, Form, Part, StoredRows
from slipway_quantize.forms.tensors import as_bytes, squares_of
from slipway_quantize.model_weights import as_tensor, require_finite

LARGEST = 6.0
_E4M3 = torch.float8_e4m3fn
_LARGEST_SCALE, _SMALLEST_SCALE = 448.0, 2.0**-9
"""Largest and smallest positive number of E4M3."""


class Fp4(Form):
    """Weights in 4-bit floats. Each group has the scale with the smallest squared error of several that fit.

    Args:
        scale_dtype: The model's own type, by its name in a safetensors header.
    """

    group_size: int

    def __init__(self, scale_dtype: str) -> None:
        # compressed-tensors unpacks to bfloat16, whatever the model's type.
        self.dequantize = scale_dtype != "BF16"

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:  # noqa: ARG002 - the same for all
        """As :meth:`Form.parts`."""
        rows, columns = shape
        return {"weight_packed": ("U8", (rows, columns // 2))}

    @abstractmethod
    def scales(self, largest: Tensor, module: str) -> list[tuple[Tensor, Tensor]]:
        """Return two scales to try for groups with these largest weights (R, G): as stored, and as float32 factors."""

    def round_rows(self, weight: NDArray[Any], row: int, *, module: str, name: str) -> StoredRows:  # noqa: ARG002 - any row
        """As :meth:`Form.round_rows`."""
        require_finite(weight, name)
        exact = as_tensor(weight).float()
        groups = exact.reshape(len(exact), -1, self.group_size)  # (R, G, S)
        tried: list[tuple[Tensor, Tensor, Tensor]] = []  # scales as stored, as factors, and squared errors
        for stored, factor in self.scales(groups.abs().amax(dim=-1), module):
            error = (_unpack(groups, factor) - groups).square_().sum(dim=-1)
            tried.append((stored.view(torch.uint8), factor, error))
        first, second = tried
        better = second[2] < first[2]
        scales, factor = (torch.where(better, second[kind], first[kind]) for kind in (0, 1))
        codes = nearest_codes(groups / factor[..., None]).reshape(exact.shape)
        values = _unpack(groups, factor).reshape(exact.shape)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4  # the first in the low half
        parts = {"weight_packed": as_bytes(packed), "weight_scale": as_bytes(scales)}
        return StoredRows(parts, values.numpy, squares_of(exact, values))


class Mxfp4(Fp4):
    """Groups of 32 whose scale is a power of two, stored as its exponent plus 127."""

    format = "mxfp4-pack-quantized"
    group_size = FLOAT_GROUPS["mxfp4"]
    weights: Mapping[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """As :meth:`Form.parts`."""
        return super().parts(module, shape) | {"weight_scale": ("U8", (shape[0], shape[1] // self.group_size))}

    def scales(self, largest: Tensor, module: str) -> list[tuple[Tensor, Tensor]]:  # noqa: ARG002 - the same for all
        """As :meth:`Fp4.scales`: the power of two at which the largest weight is from 4 to 8, and the one above."""
        exponent = torch.frexp(largest)[1] - 3  # frexp's fraction is from 0.5 to 1
        exponents = [torch.where(largest > 0, exponent + more, 0).clamp_(-126, 127) for more in (0, 1)]
        return [((each + 127).to(torch.uint8), torch.ldexp(torch.ones_like(largest), each)) for each in exponents]


class Nvfp4(Fp4):
    """Groups of 16 whose scale is in FP8 (E4M3), below one in float32.

    Layers of the same parent share the scale in float32, because vLLM joins some of them (q, k, v; gate, up) and takes only one.

    Args:
        scale_dtype: As above.
        largest: Largest weight of the layers of each parent, by the parent's name.
    """

    format = "nvfp4-pack-quantized"
    group_size = FLOAT_GROUPS["nvfp4"]
    weights: Mapping[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": group_size,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }

    def __init__(self, scale_dtype: str, largest: Mapping[str, float]) -> None:
        super().__init__(scale_dtype)
        tiny = float(torch.finfo(torch.float32).tiny)
        self._global = {
            parent: torch.tensor([min(_LARGEST_SCALE * LARGEST / max(each, tiny), 1e37)])
            for parent, each in largest.items()
        }

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """As :meth:`Form.parts`."""
        scales: Part = ("F8_E4M3", (shape[0], shape[1] // self.group_size))
        return super().parts(module, shape) | {"weight_scale": scales, "weight_global_scale": ("F32", (1,))}

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:  # noqa: ARG002 - of any shape
        """As :meth:`Form.whole`."""
        return {"weight_global_scale": as_bytes(self._global[parent_of(module)])}

    def scales(self, largest: Tensor, module: str) -> list[tuple[Tensor, Tensor]]:
        """As :meth:`Fp4.scales`: the largest weight becomes 6 or 4, below which codes are closer to each other."""
        above = self._global[parent_of(module)]
        tried = [(largest / code * above).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE).to(_E4M3) for code in (LARGEST, 4.0)]
        return [(each, each.float() / above) for each in tried]


def parent_of(module: str) -> str:
    """Return the name of the module that holds a layer."""
    return module.rpartition(".")[0]


def _unpack(groups: Tensor, factor: Tensor) -> Tensor:
    """Round groups (R, G, S) with factors (R, G); return the values that compressed-tensors unpacks."""
    return nearest(groups / factor[..., None]).mul_(factor[..., None]).bfloat16().float()


def nearest(values: Tensor) -> Tensor:
    """Return the nearest 4-bit floats; a tie goes to the even code."""
    size = values.abs()
    step = 0.5 * (1 + (size >= 2).float() + 2 * (size >= 4).float())  # between two floats: 0.5, 1 or 2
    return (size / step).round_().mul_(step).clamp_(max=LARGEST).copysign_(values)


def nearest_codes(values: Tensor) -> Tensor:
    """Return the codes of the nearest floats: the magnitude's place, plus 8 for those below zero. uint8."""
    size = nearest(values).abs_()
    places = torch.where(size <= 2, 2 * size, torch.where(size <= 4, size + 2, size / 2 + 4)).to(torch.uint8)
    return places | (values < 0).to(torch.uint8) << 3
