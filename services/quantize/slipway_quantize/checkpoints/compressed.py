"""Write the linear layers of a Hugging Face folder in a format of compressed-tensors.

transformers and vLLM load it without further settings. This module writes a few rows at a time; the library itself needs the
whole model in memory, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.dtypes import DTYPES, numpy_dtypes
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec
from slipway.model.weights.reading import Weights, row_pieces
from slipway.stage import Context
from slipway_quantize.calibrated import WITHOUT_DATA
from slipway_quantize.checkpoints.plan import Plan, kept_reasons, make_plan, split_experts
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.experts import TARGET
from slipway_quantize.forms.choice import Layers, choose_mixed, form_of, least_width
from slipway_quantize.forms.form import Form
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.model_weights import (
    read_rows,
    read_tensors,
    require_finite,
)
from slipway_quantize.pieces import PIECE_WEIGHTS, Pieces, Squares
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import Outcome, read_json, warn_unaligned, warn_unknown, write_json
from slipway_quantize.sensitive import kept_names


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
    weights, stacks = split_experts(request, weights)
    tensors = read_tensors(weights)
    plan = make_plan(request, tensors, stacks)
    sources = {weight.module: tensors[name] for name, made in plan.linear.items() for weight in made}
    stored = {weight.module: weight.stored for made in plan.linear.values() for weight in made}
    layers = Layers(
        sources, weights, plan.scale_dtype, plan.unpacked, plan.calibrated, plan.asymmetric, plan.least, plan.experts
    )
    form = form_of(request, layers)
    outcome = Outcome(
        method=f"compressed-tensors {form.format}" if params.packed else "dense weights on the grid",
        details={"scale_dtype": DTYPES[plan.scale_dtype].torch, "lm_head_untied": plan.untied},
    )
    planned = partial(_plan_groups, tensors, plan, packed=params.packed)
    if request.size_budget is not None and not plan.one_width:
        assert isinstance(form, PackedIntegers)  # other levels have no budget
        choice, form = choose_mixed(request, layers, form, request.size_budget, planned=planned, tensors=tensors)
        plan = replace(plan, calibrated=form.calibrated)
        outcome.bits = {f"{stored[name.removesuffix('.weight')]}.weight": bits for name, bits in choice.bits.items()}
        outcome.details["mixed_precision"] = dict(choice.facts)
    elif isinstance(form, PackedIntegers) and form.bits:
        outcome.bits = {f"{stored[module]}.weight": form.bits.get(module, form.level.bits) for module in sources}
    if plan.experts:
        outcome.details["expert_matrices"] = len(plan.experts)
    grouped = {name: _plan_tensor(tensor, plan, form, params.packed) for name, tensor in tensors.items()}
    groups = [group for made in grouped.values() for group in made]
    if params.packed:
        _require_smaller(
            sum(tensor.nbytes for tensor in tensors.values()),
            sum(spec.nbytes for group in groups for spec in group),
            params.level,
        )
    done, why_kept = 0, kept_reasons(plan)
    work = request.work
    with (
        WeightsFile(request.target, groups, max_shard_bytes=params.max_shard_bytes, work=work) as file,
        Pieces(outcome, threads=ctx.threads, each=work.squares if work else None) as pieces,
    ):
        here = {name: [group[0].name for group in made if file.holds(group[0].name)] for name, made in grouped.items()}
        own = frozenset(name.rpartition(".")[0] for names in here.values() for name in names)
        total = sum(tensor.nbytes for tensor in tensors.values() if here[tensor.name])
        write = partial(_write_rows, plan=plan, form=form, packed=params.packed, file=file, own=own)
        for tensor in tensors.values():
            _record(tensor.name, plan, why_kept, outcome)
            if not here[tensor.name]:
                continue
            for weight in plan.linear.get(tensor.name, []) if params.packed else []:
                for part, values in form.whole(weight.module, tensor.shape).items():
                    file.write_bytes(f"{weight.stored}.{part}", values, row=0)
            for row, count in row_pieces(tensor, PIECE_WEIGHTS):
                ctx.progress("quantize", done=done, total=total)
                read = partial(read_rows, weights, tensor, row, count)
                pieces.add(partial(write, tensor.name, read, row))
                done += tensor.nbytes * count // (tensor.shape[0] if tensor.shape else 1)
    ctx.progress("quantize", done=done, total=total)
    warn_unaligned([weight.stored for weight in plan.unaligned], least_width(request), ctx)
    asked = [name for weight in plan.asked for name in (weight.module, weight.stored)]
    warn_unknown(kept_names(params.keep), [*asked, *plan.stacked], ctx)
    _warn_kept(tensors, plan, ctx)
    _write_config(request.target / "config.json", plan, form if params.packed else None)
    return outcome


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


def _plan_groups(tensors: Mapping[str, TensorInfo], plan: Plan, form: Form, *, packed: bool) -> list[list[TensorSpec]]:
    return [group for tensor in tensors.values() for group in _plan_tensor(tensor, plan, form, packed)]


def _plan_tensor(tensor: TensorInfo, plan: Plan, form: Form, packed: bool) -> list[list[TensorSpec]]:
    """Return the tensors written for one tensor of the checkpoint, in groups that must be in one shard."""
    groups = [[TensorSpec(tensor.name, tensor.dtype, tensor.shape)]] if tensor.name in plan.dense else []
    for weight in plan.linear.get(tensor.name, []):
        parts = form.parts(weight.module, tensor.shape) if packed else {"weight": (tensor.dtype, tensor.shape)}
        groups.append([TensorSpec(f"{weight.stored}.{part}", *stored) for part, stored in parts.items()])
    return groups


def _write_rows(
    name: str,
    read: Callable[[], NDArray[Any]],
    row: int,
    *,
    plan: Plan,
    form: Form,
    packed: bool,
    file: WeightsFile,
    own: frozenset[str],
) -> Squares:
    """Copy rows of a tensor, or round them for the linear layers that are made from it and are among ``own``, or both."""
    values, squares = read(), (0.0, 0.0)
    if name in plan.dense:
        require_finite(values, name)
        file.write(name, values, row=row)
    for weight in plan.linear.get(name, ()):
        if weight.stored not in own:
            squares = (0.0, 0.0)
            continue
        rounded = form.round_rows(values, row, module=weight.module, name=name)
        squares = rounded.squares
        if packed:
            for part, stored in rounded.parts.items():
                file.write_bytes(f"{weight.stored}.{part}", stored, row=row)
        else:
            file.write(f"{weight.stored}.weight", _as_stored(rounded.values(), plan.scale_dtype, values.dtype), row=row)
    return squares


def _as_stored(values: NDArray[Any], scale_dtype: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return rounded weights as a model computes them, in the type of its scales, and stores them, in the weight's own."""
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtypes(scale_dtype)[scale_dtype]).astype(dtype)


def _record(name: str, plan: Plan, why_kept: Mapping[str, str], outcome: Outcome) -> None:
    for weight in plan.linear.get(name, []):
        outcome.quantized.append(f"{weight.stored}.weight")
        if plan.calibrated:
            given = plan.calibrated.get(weight.module)
            outcome.methods[f"{weight.stored}.weight"] = WITHOUT_DATA if given is None else given.method
    if name in plan.dense:
        outcome.kept[name] = why_kept.get(name, "not the weight of a linear layer")


def _warn_kept(tensors: dict[str, TensorInfo], plan: Plan, ctx: Context) -> None:
    """Warn if much of the model could not be quantized (for example expert weights that are not linear layers)."""
    kept = sum(tensors[name].nbytes for name in plan.dense - plan.linear.keys())
    total = sum(tensor.nbytes for tensor in tensors.values())
    if kept > total // 2:
        ctx.warn(
            f"{kept / total:.0%} of the weights are not in linear layers (embeddings, fused experts, convolutions) and "
            "keep their precision"
        )


def _write_config(path: Path, plan: Plan, form: Form | None) -> None:
    """Describe the weights in config.json; no form stands for dense ones."""
    config = read_json(path)
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = DTYPES[plan.scale_dtype].torch
    if plan.untied:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    if form is not None:
        named = {weight.module for weight in (*plan.unaligned, *plan.asked, *plan.apart)}
        ignore = sorted({*plan.kept, *plan.wide, *plan.ignored, *named})
        config["quantization_config"] = _quantization_config(form, ignore=ignore, experts=bool(plan.experts))
        if plan.unpacked or form.dequantize:
            config["quantization_config"]["dequantize"] = True
    write_json(path, config)


def _quantization_config(form: Form, *, ignore: list[str], experts: bool) -> dict[str, Any]:
    """Return ``quantization_config`` of config.json as compressed-tensors 0.20 writes it.

    Experts have the scheme of the class ``Linear``; of several schemes, transformers takes the one that names them.
    """
    made = form.schemes()
    schemes = [
        {
            "format": form.format,
            "targets": [*targets, TARGET] if experts and len(made) > 1 and "Linear" in targets else targets,
            "weights": dict(weights),
            "input_activations": None if form.activations is None else dict(form.activations),
            "output_activations": None,
        }
        for targets, weights in made
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
