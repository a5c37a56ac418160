"""Write int8 and int4 weights of a Hugging Face folder in the ``pack-quantized`` format of compressed-tensors.

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

import numpy as np
import torch
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.models.dtypes import numpy_dtypes
from slipway.models.safetensors_file import TensorInfo
from slipway.models.safetensors_layout import TensorSpec, plan_files
from slipway.models.weights.reading import Weights, row_pieces
from slipway.stage import Context
from slipway_quantize.calibrated import WITHOUT_DATA, CalibratedWeight, Calibration, mismatch
from slipway_quantize.checkpoints.checkpoint import (
    DTYPE_NAMES,
    DTYPES,
    as_array,
    read_rows,
    read_tensors,
    require_finite,
)
from slipway_quantize.checkpoints.structure import LinearWeight, find_linear_layers, model_config, require_family
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.companions import read_json, write_json
from slipway_quantize.grid.rounding import Rounded, round_weight
from slipway_quantize.grid.search import Array, pack_words
from slipway_quantize.levels import IntLevel
from slipway_quantize.mixed.budget import SizeBudget
from slipway_quantize.mixed.choice import Candidate, Choice, choose_bits
from slipway_quantize.pieces import Pieces, Squares
from slipway_quantize.report import KEPT, Outcome, warn_unaligned, warn_unknown
from slipway_quantize.writing import PIECE_WEIGHTS

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan for each tensor of the checkpoint: the linear weights made from it, and whether it is copied itself.

    ``calibrated`` has the integers of weights that a calibration has chosen, by module. ``asymmetric``: every weight has zero points.
    ``bits``: those of each weight, by module.
    """

    linear: dict[str, list[LinearWeight]]
    dense: frozenset[str]
    unaligned: tuple[LinearWeight, ...]
    kept: tuple[str, ...]
    asked: tuple[LinearWeight, ...]
    unpacked: bool
    scale_dtype: torch.dtype
    untied: bool
    calibrated: Mapping[str, CalibratedWeight]
    asymmetric: bool
    bits: Mapping[str, int]


def write_int(
    source: Path,
    weights: Weights,
    target: Path,
    level: IntLevel,
    *,
    max_shard_bytes: int,
    ctx: Context,
    calibration: Calibration | None = None,
    widths: tuple[int, ...] = (),
    budget: SizeBudget | None = None,
) -> Outcome:
    """Write ``weights`` of the folder ``source`` with its linear layers in ``level``, and config.json to match.

    A decoder's tied lm_head is untied: the head is quantized, the embedding keeps its type, because transformers 5.23 cannot
    load a quantized embedding. Other heads are not quantized. With a budget, each weight gets one of ``widths`` as its bits.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` if nothing can be quantized, ``NON_FINITE_WEIGHTS``,
            ``CALIBRATION_MISMATCH``, ``SIZE_BUDGET_UNMET``, and the reasons of :func:`read_tensors`.
    """
    tensors = read_tensors(weights)
    plan = _plan(source, tensors, level, calibration)
    outcome = Outcome(
        method="compressed-tensors pack-quantized" if level.packed else "dense weights on the grid",
        details={"scale_dtype": str(plan.scale_dtype).removeprefix("torch."), "lm_head_untied": plan.untied},
    )
    if budget is not None:
        choice = _choose(weights, tensors, plan, level, widths=widths, budget=budget, shard=max_shard_bytes, ctx=ctx)
        plan = _mixed(plan, choice, level)
        outcome.bits = dict(choice.bits)
        outcome.details["mixed_precision"] = dict(choice.facts)
    groups = [group for tensor in tensors.values() for group in _planned_tensors(tensor, plan, level)]
    total = sum(tensor.nbytes for tensor in tensors.values())
    _require_smaller(total, sum(spec.nbytes for group in groups for spec in group), level)
    done = 0
    with (
        WeightsFile(target, groups, max_shard_bytes=max_shard_bytes) as file,
        Pieces(outcome, threads=ctx.threads) as pieces,
    ):
        for tensor in tensors.values():
            for weight in plan.linear.get(tensor.name, []) if level.packed else []:
                file.write(f"{weight.module}.weight_shape", torch.tensor(tensor.shape, dtype=torch.int64))
                if plan.asymmetric:
                    _write_zero_points(weight.module, tensor, plan=plan, level=level, file=file)
            for row, count in row_pieces(tensor, PIECE_WEIGHTS):
                ctx.progress("quantize", done=done, total=total)
                read = partial(read_rows, weights, tensor, row, count)
                pieces.add(partial(_write_rows, tensor.name, read, row, plan=plan, level=level, file=file))
                done += tensor.nbytes * count // (tensor.shape[0] if tensor.shape else 1)
            _record(tensor.name, plan, outcome)
    ctx.progress("quantize", done=done, total=total)
    warn_unaligned([weight.module for weight in plan.unaligned], level.group_size, ctx)
    warn_unknown(level.keep, [weight.module for weight in plan.asked], ctx)
    _warn_kept(tensors, plan, ctx)
    _write_config(target / "config.json", plan, level)
    return outcome


def _plan(source: Path, tensors: dict[str, TensorInfo], level: IntLevel, calibration: Calibration | None) -> _Plan:
    config = model_config(source)
    structure = find_linear_layers(config, require_family(source), tensors)
    fits: list[LinearWeight] = []
    unaligned: list[LinearWeight] = []
    asked = [weight for weight in structure.linear if level.keeps(weight.module)]
    for weight in [weight for weight in structure.linear if weight not in asked]:
        columns = tensors[weight.source].shape[1]
        (unaligned if columns % level.group_size else fits).append(weight)
    if not fits:
        raise QuantizationError(
            f"no linear layer of this {config.model_type} model has an input width that is a multiple of the group "
            f"size {level.group_size}",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="choose a smaller group size, or level bf16",
            about={"group_size": level.group_size, "model_type": config.model_type},
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
        kept=structure.kept,
        asked=tuple(asked),
        unpacked=structure.unpacked,
        scale_dtype=dtype if dtype in _SCALE_DTYPES else torch.float32,
        untied=any(weight.source != f"{weight.module}.weight" for weight in fits),
        calibrated=_calibrated(fits, tensors, calibration, but=asked) if calibration else {},
        asymmetric=calibration is not None and not calibration.symmetric,
        bits={weight.module: level.bits for weight in fits},
    )


def _choose(
    weights: Weights,
    tensors: Mapping[str, TensorInfo],
    plan: _Plan,
    level: IntLevel,
    *,
    widths: tuple[int, ...],
    budget: SizeBudget,
    shard: int,
    ctx: Context,
) -> Choice:
    """Choose the bits of each weight within a size; parts of the files that do not depend on them are counted first."""
    by_bits = {bits: replace(plan, bits=dict.fromkeys(plan.bits, bits)) for bits in widths}
    candidates = []
    for tensor in tensors.values():
        reads = [partial(_read_exact, weights, tensor, *piece) for piece in row_pieces(tensor, PIECE_WEIGHTS)]
        for weight in plan.linear.get(tensor.name, []):
            sizes = {
                bits: sum(spec.nbytes for spec in _integers(weight, tensor, of, level)) for bits, of in by_bits.items()
            }
            given = plan.calibrated.get(weight.module)
            measured = given.sensitivity if given is not None else None
            candidates.append(Candidate(f"{weight.module}.weight", tensor.shape[0], sizes, reads, measured))
    largest = [group for tensor in tensors.values() for group in _planned_tensors(tensor, by_bits[max(widths)], level)]
    files = sum(file.nbytes for file in plan_files(largest, max_shard_bytes=shard))
    fixed = files - sum(each.sizes[max(widths)] for each in candidates)
    limit = budget.of(sum(tensor.numel for tensor in tensors.values()))
    return choose_bits(candidates, fixed=fixed, limit=limit, group_size=level.group_size, ctx=ctx)


def _read_exact(weights: Weights, tensor: TensorInfo, first: int, count: int) -> Array:
    return as_array(read_rows(weights, tensor, first, count))


def _mixed(plan: _Plan, choice: Choice, level: IntLevel) -> _Plan:
    """Return the plan with the chosen bits; a calibration has the integers of one number of bits only."""
    bits = {module: choice.bits[f"{module}.weight"] for module in plan.bits}
    given = {module: found for module, found in plan.calibrated.items() if bits[module] == level.bits}
    return replace(plan, bits=bits, calibrated=given)


def _calibrated(
    fits: Sequence[LinearWeight],
    tensors: Mapping[str, TensorInfo],
    calibration: Calibration,
    *,
    but: Sequence[LinearWeight],
) -> dict[str, CalibratedWeight]:
    """Return the integers of the weights that the calibration has, by module; it may have no others ``but`` those that stay."""
    found = {}
    for weight in fits:
        rows, columns = tensors[weight.source].shape
        given = calibration.weight((f"{weight.module}.weight",), (rows, columns))
        if given is not None:
            found[weight.module] = given
    known = {*found, *(weight.module for weight in but)}
    strange = sorted(calibration.names - {f"{module}.weight" for module in known})
    if strange:
        raise mismatch(f"the model has no linear layer with the weight {strange[0]!r}", tensor=strange[0])
    return found


def _require_smaller(before: int, after: int, level: IntLevel) -> None:
    """Refuse a level that only adds a quantized lm_head to a tied embedding, or little more."""
    if level.packed and after >= before:
        raise QuantizationError(
            f"{level.bits}-bit weights would make this model larger, {after} instead of {before} bytes: its tied lm_head needs "
            "its own weights, and few other weights are linear layers",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level fp16 or bf16, or the ONNX format, where embedding and lm_head share their quantized weights",
            about={"size_before_bytes": before, "size_after_bytes": after},
        )


def _planned_tensors(tensor: TensorInfo, plan: _Plan, level: IntLevel) -> list[list[TensorSpec]]:
    """Return the tensors written for one tensor of the checkpoint, in groups that must be in one shard."""
    groups = [[TensorSpec(tensor.name, tensor.dtype, tensor.shape)]] if tensor.name in plan.dense else []
    for weight in plan.linear.get(tensor.name, []):
        whole = [TensorSpec(f"{weight.module}.weight", tensor.dtype, tensor.shape)]
        groups.append(_integers(weight, tensor, plan, level) if level.packed else whole)
    return groups


def _integers(weight: LinearWeight, tensor: TensorInfo, plan: _Plan, level: IntLevel) -> list[TensorSpec]:
    """Return the tensors that are written for one packed weight."""
    (rows, columns), bits = tensor.shape, plan.bits[weight.module]
    parts = [
        TensorSpec(f"{weight.module}.weight_packed", "I32", (rows, columns * bits // 32)),
        TensorSpec(f"{weight.module}.weight_scale", DTYPE_NAMES[plan.scale_dtype], (rows, columns // level.group_size)),
        TensorSpec(f"{weight.module}.weight_shape", "I64", (2,)),
    ]
    if plan.asymmetric:
        words = -(-rows * bits // 32)
        parts.append(TensorSpec(f"{weight.module}.weight_zero_point", "I32", (words, columns // level.group_size)))
    return parts


def _write_rows(
    name: str, read: Callable[[], Tensor], row: int, *, plan: _Plan, level: IntLevel, file: WeightsFile
) -> Squares:
    """Copy rows of a tensor, or round them for the linear layers that are made from it, or both."""
    values = read()
    if name in plan.dense:
        require_finite(values, name)
        file.write(name, values, row=row)
    if name not in plan.linear:
        return 0.0, 0.0
    scale_dtype = numpy_dtypes(DTYPE_NAMES[plan.scale_dtype])[DTYPE_NAMES[plan.scale_dtype]]
    exact, squares = as_array(values), (0.0, 0.0)
    plain: dict[int, Rounded] = {}
    for weight in plan.linear[name]:
        given, bits = plan.calibrated.get(weight.module), plan.bits[weight.module]
        if given is not None:
            rounded = given.round(exact, row, scale_dtype=scale_dtype, name=f"{weight.module}.weight")
        else:
            if bits not in plain:
                plain[bits] = round_weight(
                    exact, bits=bits, group_size=level.group_size, scale_dtype=scale_dtype, name=name
                )
            rounded = plain[bits]
        squares = rounded.error, rounded.energy
        if level.packed:
            file.write_bytes(f"{weight.module}.weight_packed", rounded.packed, row=row)
            file.write_bytes(f"{weight.module}.weight_scale", rounded.scales, row=row)
        else:
            dense = torch.from_numpy(rounded.values(bits)).to(plan.scale_dtype).to(values.dtype)
            file.write(f"{weight.module}.weight", dense, row=row)
    return squares


def _write_zero_points(module: str, tensor: TensorInfo, *, plan: _Plan, level: IntLevel, file: WeightsFile) -> None:
    """Write a weight's zero points, packed along its rows; 0 for a weight that has none."""
    rows, columns = tensor.shape
    given = plan.calibrated.get(module)
    zeros = given.zero_points() if given is not None else None
    if zeros is None:
        zeros = np.zeros((rows, columns // level.group_size), np.int8)
    packed = np.ascontiguousarray(pack_words(zeros.T, bits=plan.bits[module]).T)
    file.write_bytes(f"{module}.weight_zero_point", packed, row=0)


def _record(name: str, plan: _Plan, outcome: Outcome) -> None:
    for weight in plan.linear.get(name, []):
        outcome.quantized.append(f"{weight.module}.weight")
        if plan.calibrated:
            given = plan.calibrated.get(weight.module)
            outcome.methods[f"{weight.module}.weight"] = WITHOUT_DATA if given is None else given.method
    if name in plan.dense:
        unaligned = any(weight.source == name for weight in plan.unaligned)
        head = name.removesuffix(".weight") in plan.kept
        why = "a head" if head else "not the weight of a linear layer"
        why = KEPT if any(weight.source == name for weight in plan.asked) else why
        outcome.kept[name] = "input width is not a multiple of the group size" if unaligned else why


def _warn_kept(tensors: dict[str, TensorInfo], plan: _Plan, ctx: Context) -> None:
    """Warn if much of the model could not be quantized (for example expert weights that are not linear layers)."""
    kept = sum(tensors[name].nbytes for name in plan.dense - plan.linear.keys())
    total = sum(tensor.nbytes for tensor in tensors.values())
    if kept > total // 2:
        ctx.warn(
            f"{kept / total:.0%} of the weights are not in linear layers (embeddings, fused experts, convolutions) and "
            "keep their precision"
        )


def _write_config(path: Path, plan: _Plan, level: IntLevel) -> None:
    config = read_json(path)
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = str(plan.scale_dtype).removeprefix("torch.")
    if plan.untied:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    if level.packed:
        ignore = sorted({*plan.kept, *(weight.module for weight in (*plan.unaligned, *plan.asked))})
        config["quantization_config"] = _quantization_config(
            level, plan.bits, ignore=ignore, symmetric=not plan.asymmetric
        )
        # compressed-tensors 0.20 expects unpacked zero points in a model that it unpacks later
        if plan.unpacked or plan.asymmetric:
            config["quantization_config"]["dequantize"] = True
    write_json(path, config)


def _quantization_config(
    level: IntLevel, bits: Mapping[str, int], *, ignore: list[str], symmetric: bool
) -> dict[str, Any]:
    """Return ``quantization_config`` of config.json as compressed-tensors 0.20 writes it.

    Weights of more bits than the level's are named in groups of their own, because the most exact target of a layer counts.
    """
    targets = {level.bits: ["Linear"]}
    for module, own in sorted(bits.items()):
        if own != level.bits:
            targets.setdefault(own, []).append(module)
    widest_first = sorted(
        targets.items(), reverse=True
    )  # the library warns of names behind a class that they match too
    schemes = [_scheme(own, named, level, symmetric=symmetric) for own, named in widest_first]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": scheme for index, scheme in enumerate(schemes)},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": version("compressed-tensors"),
    }


def _scheme(bits: int, targets: list[str], level: IntLevel, *, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": level.group_size,
        "dynamic": False,
    }
    return {
        "format": "pack-quantized",
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
