"""Choose the form of a level, what it needs from the whole model, and the bits of each weight within a size.

Only forms that are no integers import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipway.errors import QuantizationError
from slipway.levels import widths_of
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec, plan_files
from slipway.model.weights.reading import Weights, row_pieces
from slipway_quantize.calibrated import CalibratedWeight
from slipway_quantize.forms.form import BEFORE_LOADING, FLOAT_GROUPS, Form
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.grid.mixed import Candidate, Choice, choose_bits
from slipway_quantize.levels import SizeBudget
from slipway_quantize.model_weights import limit_torch, read_rows, require_finite
from slipway_quantize.pieces import PIECE_WEIGHTS
from slipway_quantize.quantizer import QuantizeRequest


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers that are quantized.

    Attributes:
        sources: The stored tensor of each layer's weight, by module.
        weights: Reads them.
        scale_dtype: Type of scales, by its name in a safetensors header: the model's own.
        unpacked: Whether transformers must unpack the weights while it loads them.
        calibrated: Integers that a calibration has chosen, by module.
        asymmetric: Whether integers have zero points.
        least: Fewest bits of weights that must have more than the level, by module.
        experts: Layers that have the level's bits whatever the budget is.
    """

    sources: Mapping[str, TensorInfo]
    weights: Weights
    scale_dtype: str
    unpacked: bool
    calibrated: Mapping[str, CalibratedWeight]
    asymmetric: bool
    least: Mapping[str, int]
    experts: frozenset[str] = frozenset()


def least_width(request: QuantizeRequest) -> int:
    """Return the number that the input width of a layer must be a multiple of."""
    level = request.params.integers
    if level is not None:
        return math.lcm(level.group_size, 32 // math.gcd(32, level.bits))  # whole groups, and whole words in a row
    return FLOAT_GROUPS.get(request.params.level, 1)


def form_of(request: QuantizeRequest, layers: Layers) -> Form:
    """Return the form of the requested level.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: the model is unpacked while it loads, and the level rounds activations; the
            reasons of :func:`~slipway_quantize.forms.ranges.input_ranges`, and ``NON_FINITE_WEIGHTS``.
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
    limit_torch(request.ctx.threads)
    from slipway_quantize.forms.channels import Channels
    from slipway_quantize.forms.fp4 import Mxfp4

    forms: Mapping[str, Callable[[], Form]] = {
        "mxfp4": partial(Mxfp4, scale_dtype),
        "nvfp4": partial(_nvfp4_form, layers, request),
        "fp8": partial(Channels, "F8_E4M3", scale_dtype=scale_dtype),
        "fp8_static": partial(_static_form, layers, request),
        "w8a8": partial(Channels, "I8", scale_dtype=scale_dtype),
    }
    if request.params.level not in FLOAT_GROUPS:
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


def _static_form(layers: Layers, request: QuantizeRequest) -> Form:
    from slipway_quantize.forms.channels import Channels
    from slipway_quantize.forms.ranges import input_ranges

    ranges = input_ranges(request.model, request.inputs, list(layers.sources), request.ctx)
    return Channels("F8_E4M3", scale_dtype=layers.scale_dtype, ranges=ranges)


def _nvfp4_form(layers: Layers, request: QuantizeRequest) -> Form:
    """Read all weights once for their largest values, which set the scale of whole tensors."""
    from slipway_quantize.forms.fp4 import Nvfp4, parent_of

    largest: dict[str, float] = {}
    for module, tensor in layers.sources.items():
        for row, count in row_pieces(tensor, PIECE_WEIGHTS):
            request.ctx.check_cancelled()
            values = read_rows(layers.weights, tensor, row, count)
            require_finite(values, tensor.name)
            parent = parent_of(module)
            largest[parent] = max(largest.get(parent, 0.0), float(np.abs(values).max()))
    return Nvfp4(layers.scale_dtype, largest)


def choose_mixed(
    request: QuantizeRequest,
    layers: Layers,
    form: PackedIntegers,
    budget: SizeBudget,
    *,
    planned: Callable[[Form], list[list[TensorSpec]]],
    tensors: Mapping[str, TensorInfo],
) -> tuple[Choice, PackedIntegers]:
    """Return the bits of each weight, by its name, and the form with them.

    Args:
        request: The request.
        layers: The layers that are quantized.
        form: The form in which all weights have the level's bits.
        budget: The largest size.
        planned: Function that returns the tensors that are written in a form, in groups that must be in one file.
        tensors: The tensors of the folder.

    Raises:
        QuantizationError: ``SIZE_BUDGET_UNMET``, with the smallest possible size; ``NON_FINITE_WEIGHTS``.
    """
    sources = {module: tensor for module, tensor in layers.sources.items() if module not in layers.experts}
    by_bits = {bits: form.with_bits(dict.fromkeys(sources, bits)) for bits in widths_of(request.params.level)}
    candidates = [_candidate(module, tensor, layers, by_bits) for module, tensor in sources.items()]
    widest = max(by_bits)
    files = plan_files(planned(by_bits[widest]), max_shard_bytes=request.params.max_shard_bytes)
    fixed = sum(file.nbytes for file in files) - sum(each.sizes[widest] for each in candidates)
    choice = choose_bits(
        candidates,
        fixed=fixed,
        budget=budget,
        weights=sum(tensor.numel for tensor in tensors.values()),
        group_size=form.level.group_size,
        ctx=request.ctx,
    )
    return choice, form.with_bits({module: choice.bits[f"{module}.weight"] for module in sources})


def _candidate(module: str, tensor: TensorInfo, layers: Layers, by_bits: Mapping[int, PackedIntegers]) -> Candidate:
    sizes = {
        bits: sum(TensorSpec(module, *part).nbytes for part in form.parts(module, tensor.shape).values())
        for bits, form in by_bits.items()
        if bits >= layers.least.get(module, 0)
    }
    pieces = [partial(read_rows, layers.weights, tensor, *piece) for piece in row_pieces(tensor, PIECE_WEIGHTS)]
    given = layers.calibrated.get(module)
    return Candidate(f"{module}.weight", sizes, pieces, given.sensitivity if given else None)
