"""Plan which linear layers of a Hugging Face folder a level rounds, and why the others keep their type."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slipway.errors import QuantizationError
from slipway.levels import LEVELS
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import Weights
from slipway_quantize.calibrated import CalibratedWeight, Calibration, mismatch_error
from slipway_quantize.experts import EXPERT, STACKS, keeps_experts, mixture_of
from slipway_quantize.forms.choice import least_width
from slipway_quantize.layers.finding import find_structure
from slipway_quantize.layers.structure import LinearWeight, Structure
from slipway_quantize.levels import WIDE
from slipway_quantize.params import WITHOUT_BUDGET, size_budget_refusal
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import KEPT
from slipway_quantize.sensitive import allowed_names, kept_names, sensitive_reason
from slipway_quantize.split_experts import SplitExperts, require_whole_experts

_APART = "it should have more bits than the others, and transformers unpacks all weights of this model with the same"
_NARROW_FLOATS = ("nvfp4", "mxfp4")
_INITIALIZED = ("falcon_mamba", "mamba", "mamba2")
"""Types whose code looks at weights of layers before the model runs, which packed ones do not have until then."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_STACK = 3
"""Axes of a stack of matrices."""
_SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for each tensor of the checkpoint: the linear weights made from it, and whether it is copied itself.

    ``wide`` has the layers that keep their type by default, with the reason, by module. ``experts``: matrices of experts in ``linear``, which
    all have the level's bits, because vLLM has one scheme for the experts of a layer. ``ignored``: more names for ``ignore``.
    ``calibrated`` has the integers that a calibration has chosen, by module. ``asymmetric``: weights have zero points. ``least`` has the
    fewest bits of weights that need more than the level, by module. ``apart``: weights that need other bits than the rest, and keep their type.
    ``stacked``: names that stand for experts in stacks, which keep their type. ``renamed``: stored names of tensors that transformers gives other
    names, by these.
    """

    linear: dict[str, list[LinearWeight]]
    dense: frozenset[str]
    unaligned: tuple[LinearWeight, ...]
    kept: tuple[str, ...]
    asked: tuple[LinearWeight, ...]
    apart: tuple[LinearWeight, ...]
    one_width: bool
    unpacked: bool
    scale_dtype: str
    untied: bool
    calibrated: Mapping[str, CalibratedWeight]
    asymmetric: bool
    least: Mapping[str, int]
    wide: Mapping[str, str]
    experts: frozenset[str]
    ignored: tuple[str, ...]
    stacked: tuple[str, ...]
    renamed: Mapping[str, str]


def split_experts(request: QuantizeRequest, weights: Weights) -> tuple[Weights, Mapping[str, TensorInfo]]:
    """Return weights in which each matrix of an expert is a tensor, and the stacks that they were; all experts keep their type if asked for."""
    mixture = mixture_of(request.model.config)
    if mixture is None or keeps_experts(request.params.keep) or not request.params.packed:
        return weights, {}
    split = SplitExperts(weights, mixture)
    return split, split.stacks


def make_plan(request: QuantizeRequest, tensors: dict[str, TensorInfo], stacks: Mapping[str, TensorInfo]) -> Plan:
    """Plan what is made of each tensor.

    Args:
        request: The request.
        tensors: The tensors of the checkpoint, in which experts of stacks may be tensors of their own.
        stacks: The stacks that these are parts of, by name.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``, ``CALIBRATION_MISMATCH``, and the reasons of :func:`find_structure`.
    """
    structure, keep = find_structure(request.model, tensors, stacks), kept_names(request.params.keep)
    width, calibration = least_width(request), request.calibration
    fits: list[LinearWeight] = []
    unaligned: list[LinearWeight] = []
    asked = [weight for weight in structure.linear if weight.is_among(keep)]
    allowed = allowed_names(request.params.keep)
    wide = {
        weight.module: why
        for weight in structure.linear
        if weight not in asked and not weight.is_among(allowed) and (why := sensitive_reason(weight.module))
    }
    head = [weight for weight in structure.linear if _is_kept_head(weight, structure, request) and weight not in asked]
    left = {weight.module for weight in (*asked, *head)} | wide.keys()
    require_whole_experts(structure.experts, tensors, width=width, keep=keep, packed=request.params.packed)
    for weight in [*(weight for weight in structure.linear if weight.module not in left), *structure.experts]:
        columns = tensors[weight.source].shape[1]
        (unaligned if columns % width else fits).append(weight)
    if not fits:
        raise _no_layer_error(
            f"has an input width that is a multiple of the group size {width}",
            remedy="choose a smaller group size, or level bf16",
            about={"group_size": width, "model_type": structure.model_type},
        )
    unused = {*(weight.module for weight in asked), *wide}
    if calibration and structure.stacked:  # it may have the matrices of experts that stay in their stacks
        unused |= {name.removesuffix(".weight") for name in calibration.names if EXPERT.match(name)}
    calibrated = _find_calibrated(fits, tensors, calibration, but=unused) if calibration else {}
    asymmetric = calibration is not None and not calibration.symmetric
    least = {structure.head: request.params.head_bits} if structure.head not in calibrated else {}
    initialized = structure.model_type in _INITIALIZED and not LEVELS[request.params.level].activations
    unpacked = structure.unpacked or initialized
    one_width = request.params.packed and (unpacked or asymmetric)
    if one_width:
        _require_no_budget(request, structure.model_type)
    more_bits = (
        _wide_modules(request, least | {module: given.bits for module, given in calibrated.items()})
        if one_width
        else set()
    )
    apart = [each for each in fits if each.module in more_bits]
    fits = [each for each in fits if each.module not in more_bits]
    if not fits:
        raise _no_layer_error(
            "has the level's bits, and transformers unpacks all of them with the same",
            remedy="use level int8, or give fewer layers 8 bits",
            about={"model_type": structure.model_type},
        )
    linear = defaultdict(list)
    for weight in fits:
        linear[weight.source].append(weight)
    replaced = {weight.source for weight in fits if not weight.tied}
    dtype = structure.dtype if structure.dtype in _SCALE_DTYPES else tensors[fits[0].source].dtype
    return Plan(
        linear=dict(linear),
        dense=frozenset(tensors) - replaced,
        unaligned=tuple(unaligned),
        kept=(*structure.kept, *(weight.module for weight in head)),
        asked=tuple(asked),
        apart=tuple(apart),
        one_width=one_width,
        unpacked=unpacked,
        scale_dtype=dtype if dtype in _SCALE_DTYPES else "F32",
        untied=any(weight.tied for weight in fits),
        calibrated={each.module: calibrated[each.module] for each in fits if each.module in calibrated},
        asymmetric=asymmetric,
        least={each.module: least[each.module] for each in fits if each.module in least},
        wide=wide | {module: sensitive_reason(module) for module in structure.routers},
        experts=frozenset(each.module for each in structure.experts),
        ignored=_more_ignored(tensors, structure),
        stacked=("experts",) if structure.stacked else (),
        renamed=structure.renamed,
    )


def _more_ignored(tensors: Mapping[str, TensorInfo], structure: Structure) -> tuple[str, ...]:
    """Return names that only vLLM needs in ``ignore``: experts in stacks, and what predicts further tokens, which transformers does not load."""
    layers = structure.layers
    known = {weight.source for weight in (*structure.linear, *structure.experts)}
    further = [
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if name.endswith(".weight") and len(info.shape) > 1 and name not in known and _predicts_more(name, layers)
    ]
    stacks = {
        rf"re:{re.escape(name.rpartition('.')[0])}(\..*)?$"
        for name, info in tensors.items()
        if len(info.shape) == _STACK and ".experts." in name and _predicts_more(name, layers)
    }
    return (*further, *sorted(stacks), *((STACKS,) if structure.stacked else ()))


def _predicts_more(name: str, layers: int | None) -> bool:
    """Return whether a tensor belongs to multi-token prediction: a part of its own, or a layer behind the last one."""
    number = _LAYER.search(name)
    beyond = layers is not None and number is not None and int(number[1]) >= layers
    return name.startswith("mtp.") or beyond


def _is_kept_head(weight: LinearWeight, structure: Structure, request: QuantizeRequest) -> bool:
    """Return whether a layer is an uncalibrated head that keeps its type at 8 head bits: it is tied, or the level has only 4-bit floats."""
    if weight.module != structure.head or request.params.head_bits < WIDE:
        return False
    if request.calibration is not None and f"{weight.module}.weight" in request.calibration.names:
        return False
    return weight.tied or request.params.level in _NARROW_FLOATS


def _no_layer_error(why: str, *, remedy: str, about: dict[str, object]) -> QuantizationError:
    message = f"no linear layer of this {about['model_type']} model {why}"
    return QuantizationError(message, reason="QUANTIZATION_UNSUPPORTED", remedy=remedy, about=about)


def _wide_modules(request: QuantizeRequest, bits: Mapping[str, int]) -> set[str]:
    """Return the layers that need more bits than the level's integers have."""
    level = request.params.integers
    return set() if level is None else {module for module, asked in bits.items() if asked > level.bits}


def _require_no_budget(request: QuantizeRequest, model_type: str) -> None:
    """Refuse a size budget for a model whose weights transformers unpacks with the same bits while loading."""
    if request.size_budget is None or not request.size_budget.is_asked:
        return
    raise QuantizationError(
        size_budget_refusal(model_type),
        reason="QUANTIZATION_UNSUPPORTED",
        remedy=WITHOUT_BUDGET,
        about={"model_type": model_type},
    )


def _find_calibrated(
    fits: Sequence[LinearWeight],
    tensors: Mapping[str, TensorInfo],
    calibration: Calibration,
    *,
    but: Collection[str],
) -> dict[str, CalibratedWeight]:
    """Return the calibration's integers by module; refuse a calibration of weights that are neither in ``fits`` nor in ``but``."""
    integers = {}
    for weight in fits:
        rows, columns = tensors[weight.source].shape
        given = calibration.weight((f"{weight.module}.weight",), (rows, columns))
        if given is not None:
            integers[weight.module] = given
    known = {*integers, *but}
    strange = sorted(calibration.names - {f"{module}.weight" for module in known})
    if strange:
        raise mismatch_error(f"the model has no linear layer with the weight {strange[0]!r}", tensor=strange[0])
    return integers


def kept_reasons(plan: Plan) -> dict[str, str]:
    """Return why each tensor that the level might have rounded keeps its type, by name."""
    wide = {f"{module}.weight": why for module, why in plan.wide.items()}
    reasons = (
        (plan.asked, KEPT),
        (plan.apart, _APART),
        (plan.unaligned, "input width is not a multiple of the group size"),
    )
    heads = {f"{module}.weight": "a head" for module in plan.kept}
    by_name = {plan.renamed.get(name, name): why for name, why in (heads | wide).items()}
    return by_name | {weight.source: why for weights, why in reasons for weight in weights}
