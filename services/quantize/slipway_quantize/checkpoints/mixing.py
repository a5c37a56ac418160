"""Choose the bits of each weight of a transformers folder within a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from slipway.levels import widths_of
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec, plan_files
from slipway.model.weights.reading import Weights, row_pieces
from slipway_quantize.forms.choice import Layers
from slipway_quantize.forms.form import Form
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.grid.search import Array
from slipway_quantize.mixed.budget import SizeBudget
from slipway_quantize.mixed.choice import Candidate, Choice, choose_bits
from slipway_quantize.model_weights import as_array, read_rows
from slipway_quantize.pieces import PIECE_WEIGHTS
from slipway_quantize.quantizer import QuantizeRequest


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
    by_bits = {bits: form.with_bits(dict.fromkeys(layers.sources, bits)) for bits in widths_of(request.params.level)}
    candidates = [_candidate(module, tensor, layers, by_bits) for module, tensor in layers.sources.items()]
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
    return choice, form.with_bits({module: choice.bits[f"{module}.weight"] for module in layers.sources})


def _candidate(module: str, tensor: TensorInfo, layers: Layers, by_bits: Mapping[int, PackedIntegers]) -> Candidate:
    sizes = {
        bits: sum(TensorSpec(module, *part).nbytes for part in form.parts(module, tensor.shape).values())
        for bits, form in by_bits.items()
        if bits >= layers.least.get(module, 0)
    }
    pieces = [partial(_read_exact, layers.weights, tensor, *piece) for piece in row_pieces(tensor, PIECE_WEIGHTS)]
    given = layers.calibrated.get(module)
    return Candidate(f"{module}.weight", sizes, pieces, given.sensitivity if given else None)


def _read_exact(weights: Weights, tensor: TensorInfo, first: int, count: int) -> Array:
    return as_array(read_rows(weights, tensor, first, count))
