"""Write the linear layers of a Hugging Face folder in a format of compressed-tensors.

transformers and vLLM load it without further settings. This module writes a few rows at a time; the library itself needs the
whole model in memory, twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec
from slipway.model.weights.reading import Weights, row_pieces
from slipway.stage import Context
from slipway_quantize.calibrated import WITHOUT_DATA, CalibratedWeight, Calibration, mismatch_error
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.forms.choice import Layers, choose_mixed, form_of, least_width
from slipway_quantize.forms.form import Form
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.levels import WIDE, is_named
from slipway_quantize.model_weights import (
    DTYPES,
    LinearWeight,
    Structure,
    find_linear_layers,
    model_config,
    read_rows,
    read_tensors,
    require_family,
    require_finite,
)
from slipway_quantize.params import WITHOUT_BUDGET, size_budget_refusal
from slipway_quantize.pieces import PIECE_WEIGHTS, Pieces, Squares
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import KEPT, Outcome, read_json, warn_unaligned, warn_unknown, write_json

_APART = "it should have more bits than the others, and transformers unpacks all weights of this model with the same"
_NARROW_FLOATS = ("nvfp4", "mxfp4")
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan for each tensor of the checkpoint: the linear weights made from it, and whether it is copied itself.

    ``calibrated`` has the integers that a calibration has chosen, by module. ``asymmetric``: weights have zero points. ``least`` has the
    fewest bits of weights that need more than the level, by module. ``apart``: weights that need other bits than the rest, and keep their type.
    """

    linear: dict[str, list[LinearWeight]]
    dense: frozenset[str]
    unaligned: tuple[LinearWeight, ...]
    kept: tuple[str, ...]
    asked: tuple[LinearWeight, ...]
    apart: tuple[LinearWeight, ...]
    one_width: bool
    unpacked: bool
    scale_dtype: torch.dtype
    untied: bool
    calibrated: Mapping[str, CalibratedWeight]
    asymmetric: bool
    least: Mapping[str, int]


def write_compressed(request: QuantizeRequest, weights: Weights) -> Outcome:
    """Write ``weights`` of the requested folder with its linear layers at the requested level, and config.json to match.

    A decoder's head that is tied to the embedding stays as it is, because transformers 5.23 cannot load a quantized embedding; with
    fewer ``head_bits`` than 8 it is untied, and the head is quantized. Other heads are not quantized. With a size budget, each weight gets
    its own number of bits. A model that transformers unpacks while it loads has one number of bits: version 5.23 unpacks every weight by
    the first scheme. There, weights that should have more keep their type.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` if nothing can be quantized, ``NON_FINITE_WEIGHTS``,
            ``CALIBRATION_MISMATCH``, ``SIZE_BUDGET_UNMET``, and the reasons of :func:`read_tensors` and :func:`~slipway_quantize.forms.choice.form_of`.
    """
    params, ctx = request.params, request.ctx
    tensors = read_tensors(weights)
    plan = _plan(request, tensors)
    sources = {weight.module: tensors[name] for name, made in plan.linear.items() for weight in made}
    layers = Layers(sources, weights, plan.scale_dtype, plan.unpacked, plan.calibrated, plan.asymmetric, plan.least)
    form = form_of(request, layers)
    outcome = Outcome(
        method=f"compressed-tensors {form.format}" if params.packed else "dense weights on the grid",
        details={"scale_dtype": str(plan.scale_dtype).removeprefix("torch."), "lm_head_untied": plan.untied},
    )
    planned = partial(_plan_groups, tensors, plan, packed=params.packed)
    if request.size_budget is not None and not plan.one_width:
        assert isinstance(form, PackedIntegers)  # other levels have no budget
        choice, form = choose_mixed(request, layers, form, request.size_budget, planned=planned, tensors=tensors)
        plan = replace(plan, calibrated=form.calibrated)
        outcome.bits = dict(choice.bits)
        outcome.details["mixed_precision"] = dict(choice.facts)
    elif isinstance(form, PackedIntegers) and form.bits:
        outcome.bits = {f"{module}.weight": form.bits.get(module, form.level.bits) for module in sources}
    groups = planned(form)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if params.packed:
        _require_smaller(total, sum(spec.nbytes for group in groups for spec in group), params.level)
    done, why_kept = 0, _kept_reasons(plan)
    with (
        WeightsFile(request.target, groups, max_shard_bytes=params.max_shard_bytes) as file,
        Pieces(outcome, threads=ctx.threads) as pieces,
    ):
        write = partial(_write_rows, plan=plan, form=form, packed=params.packed, file=file)
        for tensor in tensors.values():
            for weight in plan.linear.get(tensor.name, []) if params.packed else []:
                for part, values in form.whole(weight.module, tensor.shape).items():
                    file.write_bytes(f"{weight.module}.{part}", values, row=0)
            for row, count in row_pieces(tensor, PIECE_WEIGHTS):
                ctx.progress("quantize", done=done, total=total)
                read = partial(read_rows, weights, tensor, row, count)
                pieces.add(partial(write, tensor.name, read, row))
                done += tensor.nbytes * count // (tensor.shape[0] if tensor.shape else 1)
            _record(tensor.name, plan, why_kept, outcome)
    ctx.progress("quantize", done=done, total=total)
    warn_unaligned([weight.module for weight in plan.unaligned], least_width(request), ctx)
    warn_unknown(params.keep, [weight.module for weight in plan.asked], ctx)
    _warn_kept(tensors, plan, ctx)
    _write_config(request.target / "config.json", plan, form if params.packed else None)
    return outcome


def _plan(request: QuantizeRequest, tensors: dict[str, TensorInfo]) -> _Plan:
    config = model_config(request.source)
    structure = find_linear_layers(config, require_family(request.source), tensors)
    width, calibration = least_width(request), request.calibration
    fits: list[LinearWeight] = []
    unaligned: list[LinearWeight] = []
    asked = [weight for weight in structure.linear if is_named(weight.module, request.params.keep)]
    head = [weight for weight in structure.linear if _is_kept_head(weight, structure, request) and weight not in asked]
    for weight in [weight for weight in structure.linear if weight not in (*asked, *head)]:
        columns = tensors[weight.source].shape[1]
        (unaligned if columns % width else fits).append(weight)
    if not fits:
        raise _no_layer_error(
            f"has an input width that is a multiple of the group size {width}",
            remedy="choose a smaller group size, or level bf16",
            about={"group_size": width, "model_type": config.model_type},
        )
    calibrated = _find_calibrated(fits, tensors, calibration, but=asked) if calibration else {}
    asymmetric = calibration is not None and not calibration.symmetric
    least = {structure.head: request.params.head_bits} if structure.head not in calibrated else {}
    one_width = request.params.packed and (structure.unpacked or asymmetric)
    if one_width:
        _require_no_budget(request, config.model_type)
    wide = (
        _wide_modules(request, least | {module: given.bits for module, given in calibrated.items()})
        if one_width
        else set()
    )
    apart = [each for each in fits if each.module in wide]
    fits = [each for each in fits if each.module not in wide]
    if not fits:
        raise _no_layer_error(
            "has the level's bits, and transformers unpacks all of them with the same",
            remedy="use level int8, or give fewer layers 8 bits",
            about={"model_type": config.model_type},
        )
    linear = defaultdict(list)
    for weight in fits:
        linear[weight.source].append(weight)
    replaced = {weight.source for weight in fits if weight.source == f"{weight.module}.weight"}
    first = DTYPES[tensors[fits[0].source].dtype]
    dtype = structure.dtype if structure.dtype in _SCALE_DTYPES else first
    return _Plan(
        linear=dict(linear),
        dense=frozenset(tensors) - replaced,
        unaligned=tuple(unaligned),
        kept=(*structure.kept, *(weight.module for weight in head)),
        asked=tuple(asked),
        apart=tuple(apart),
        one_width=one_width,
        unpacked=structure.unpacked,
        scale_dtype=dtype if dtype in _SCALE_DTYPES else torch.float32,
        untied=any(weight.source != f"{weight.module}.weight" for weight in fits),
        calibrated={each.module: calibrated[each.module] for each in fits if each.module in calibrated},
        asymmetric=asymmetric,
        least={each.module: least[each.module] for each in fits if each.module in least},
    )


def _is_kept_head(weight: LinearWeight, structure: Structure, request: QuantizeRequest) -> bool:
    """Return whether a layer is an uncalibrated head that keeps its type at 8 head bits: it is tied, or the level has only 4-bit floats."""
    if weight.module != structure.head or request.params.head_bits < WIDE:
        return False
    if request.calibration is not None and f"{weight.module}.weight" in request.calibration.names:
        return False
    tied = weight.source != f"{weight.module}.weight"
    return tied or request.params.level in _NARROW_FLOATS


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
    but: Sequence[LinearWeight],
) -> dict[str, CalibratedWeight]:
    """Return the calibration's integers by module; refuse a calibration of weights that are neither in ``fits`` nor in ``but``."""
    integers = {}
    for weight in fits:
        rows, columns = tensors[weight.source].shape
        given = calibration.weight((f"{weight.module}.weight",), (rows, columns))
        if given is not None:
            integers[weight.module] = given
    known = {*integers, *(weight.module for weight in but)}
    strange = sorted(calibration.names - {f"{module}.weight" for module in known})
    if strange:
        raise mismatch_error(f"the model has no linear layer with the weight {strange[0]!r}", tensor=strange[0])
    return integers


def _require_smaller(before: int, after: int, level: str) -> None:
    """Refuse a level that makes the model larger: it adds an lm_head to a tied embedding, and shrinks little else."""
    if after >= before:
        raise QuantizationError(
            f"level {level} would make this model larger, {after} instead of {before} bytes: its tied lm_head needs "
            "its own weights, and few other weights are linear layers",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level fp16 or bf16, or the ONNX format, where embedding and lm_head share their quantized weights",
            about={"size_before_bytes": before, "size_after_bytes": after},
        )


def _plan_groups(tensors: Mapping[str, TensorInfo], plan: _Plan, form: Form, *, packed: bool) -> list[list[TensorSpec]]:
    return [group for tensor in tensors.values() for group in _plan_tensor(tensor, plan, form, packed)]


def _plan_tensor(tensor: TensorInfo, plan: _Plan, form: Form, packed: bool) -> list[list[TensorSpec]]:
    """Return the tensors written for one tensor of the checkpoint, in groups that must be in one shard."""
    groups = [[TensorSpec(tensor.name, tensor.dtype, tensor.shape)]] if tensor.name in plan.dense else []
    for weight in plan.linear.get(tensor.name, []):
        parts = form.parts(weight.module, tensor.shape) if packed else {"weight": (tensor.dtype, tensor.shape)}
        groups.append([TensorSpec(f"{weight.module}.{part}", *stored) for part, stored in parts.items()])
    return groups


def _write_rows(
    name: str, read: Callable[[], Tensor], row: int, *, plan: _Plan, form: Form, packed: bool, file: WeightsFile
) -> Squares:
    """Copy rows of a tensor, or round them for the linear layers that are made from it, or both."""
    values, squares = read(), (0.0, 0.0)
    if name in plan.dense:
        require_finite(values, name)
        file.write(name, values, row=row)
    for weight in plan.linear.get(name, ()):
        rounded = form.round_rows(values, row, module=weight.module, name=name)
        squares = rounded.squares
        if packed:
            for part, stored in rounded.parts.items():
                file.write_bytes(f"{weight.module}.{part}", stored, row=row)
        else:
            file.write(f"{weight.module}.weight", rounded.values().to(plan.scale_dtype).to(values.dtype), row=row)
    return squares


def _kept_reasons(plan: _Plan) -> dict[str, str]:
    """Return why each tensor that the level might have rounded keeps its type, by name."""
    reasons = (
        (plan.asked, KEPT),
        (plan.apart, _APART),
        (plan.unaligned, "input width is not a multiple of the group size"),
    )
    heads = {f"{module}.weight": "a head" for module in plan.kept}
    return heads | {weight.source: why for weights, why in reasons for weight in weights}


def _record(name: str, plan: _Plan, why_kept: Mapping[str, str], outcome: Outcome) -> None:
    for weight in plan.linear.get(name, []):
        outcome.quantized.append(f"{weight.module}.weight")
        if plan.calibrated:
            given = plan.calibrated.get(weight.module)
            outcome.methods[f"{weight.module}.weight"] = WITHOUT_DATA if given is None else given.method
    if name in plan.dense:
        outcome.kept[name] = why_kept.get(name, "not the weight of a linear layer")


def _warn_kept(tensors: dict[str, TensorInfo], plan: _Plan, ctx: Context) -> None:
    """Warn if much of the model could not be quantized (for example expert weights that are not linear layers)."""
    kept = sum(tensors[name].nbytes for name in plan.dense - plan.linear.keys())
    total = sum(tensor.nbytes for tensor in tensors.values())
    if kept > total // 2:
        ctx.warn(
            f"{kept / total:.0%} of the weights are not in linear layers (embeddings, fused experts, convolutions) and "
            "keep their precision"
        )


def _write_config(path: Path, plan: _Plan, form: Form | None) -> None:
    """Describe the weights in config.json; no form stands for dense ones."""
    config = read_json(path)
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = str(plan.scale_dtype).removeprefix("torch.")
    if plan.untied:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    if form is not None:
        ignore = sorted({*plan.kept, *(weight.module for weight in (*plan.unaligned, *plan.asked, *plan.apart))})
        config["quantization_config"] = _quantization_config(form, ignore=ignore)
        if plan.unpacked or form.dequantize:
            config["quantization_config"]["dequantize"] = True
    write_json(path, config)


def _quantization_config(form: Form, *, ignore: list[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of config.json as compressed-tensors 0.20 writes it."""
    schemes = [
        {
            "format": form.format,
            "targets": targets,
            "weights": dict(weights),
            "input_activations": None if form.activations is None else dict(form.activations),
            "output_activations": None,
        }
        for targets, weights in form.schemes()
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": form.format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": scheme for index, scheme in enumerate(schemes)},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": version("compressed-tensors"),
    }
