"""Choose the form of a level, with what it needs to know of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from slipway.errors import QuantizationError
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import Weights, row_pieces
from slipway_quantize.calibrated import CalibratedWeight
from slipway_quantize.forms.activations import input_ranges
from slipway_quantize.forms.channels import Channels
from slipway_quantize.forms.form import BEFORE_LOADING, Form
from slipway_quantize.forms.fp4 import Mxfp4, Nvfp4, parent_of
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.pieces import PIECE_WEIGHTS
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.reading.tensors import read_rows, require_finite


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers that are quantized.

    Attributes:
        sources: The stored tensor of each layer's weight, by module.
        weights: Reads them.
        scale_dtype: Type of scales: the model's own.
        unpacked: Whether transformers must unpack the weights while it loads them.
        calibrated: Integers that a calibration has chosen, by module.
        asymmetric: Whether integers have zero points.
        least: Fewest bits of weights that must have more than the level, by module.
    """

    sources: Mapping[str, TensorInfo]
    weights: Weights
    scale_dtype: torch.dtype
    unpacked: bool
    calibrated: Mapping[str, CalibratedWeight]
    asymmetric: bool
    least: Mapping[str, int]


def least_width(request: QuantizeRequest) -> int:
    """Return the number that the input width of a layer must be a multiple of."""
    level = request.params.integers
    if level is not None:
        return max(level.group_size, 32) if level.bits == 3 else level.group_size  # whole words in a row
    return {"mxfp4": Mxfp4.group_size, "nvfp4": Nvfp4.group_size}.get(request.params.level, 1)


def form_of(request: QuantizeRequest, layers: Layers) -> Form:
    """Return the form of the requested level.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: the model is unpacked while it loads, and the level rounds activations; the
            reasons of :func:`~slipway_quantize.forms.activations.input_ranges`, and ``NON_FINITE_WEIGHTS``.
    """
    level, scale_dtype = request.params.integers, layers.scale_dtype
    if level is not None:
        return PackedIntegers(
            level,
            scale_dtype=scale_dtype,
            calibrated=layers.calibrated,
            asymmetric=layers.asymmetric,
            bits={module: max(bits, level.bits) for module, bits in layers.least.items()},
        )
    forms: Mapping[str, Callable[[], Form]] = {
        "mxfp4": partial(Mxfp4, scale_dtype),
        "nvfp4": partial(_nvfp4, layers, request),
        "fp8": partial(Channels, torch.float8_e4m3fn, scale_dtype=scale_dtype),
        "fp8_static": partial(_static, layers, request),
        "w8a8": partial(Channels, torch.int8, scale_dtype=scale_dtype),
    }
    if request.params.level not in ("mxfp4", "nvfp4"):
        _require_activations(request, layers)
    return forms[request.params.level]()


def _require_activations(request: QuantizeRequest, layers: Layers) -> None:
    if not layers.unpacked and request.params.packed:
        return
    level = request.params.level
    raise QuantizationError(
        f"level {level} rounds activations, "
        + (f"and {BEFORE_LOADING}" if layers.unpacked else "which dense weights do not"),
        reason="QUANTIZATION_UNSUPPORTED",
        remedy="use int8, which rounds weights alone" if layers.unpacked else "store it packed (compress_weights)",
        about={"level": level},
    )


def _static(layers: Layers, request: QuantizeRequest) -> Form:
    ranges = input_ranges(request.source, request.inputs, list(layers.sources), request.ctx)
    return Channels(torch.float8_e4m3fn, scale_dtype=layers.scale_dtype, ranges=ranges)


def _nvfp4(layers: Layers, request: QuantizeRequest) -> Form:
    """Read all weights once for their largest values: the scale of a tensor stands in every group of it."""
    found: dict[str, float] = {}
    for module, tensor in layers.sources.items():
        for row, count in row_pieces(tensor, PIECE_WEIGHTS):
            request.ctx.check_cancelled()
            values = read_rows(layers.weights, tensor, row, count)
            require_finite(values, tensor.name)
            parent = parent_of(module)
            found[parent] = max(found.get(parent, 0.0), float(values.abs().max()))
    return Nvfp4(layers.scale_dtype, found)
