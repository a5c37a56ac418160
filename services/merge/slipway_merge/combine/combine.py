"""Combine several LoRA adapters into one, exactly or by one of peft's methods.

``cat`` concatenates the pairs: its update is exactly the weighted sum of the updates, at the sum of the ranks. The other types mix
the factors A and B with peft's own functions (``peft/utils/merge_utils.py``: TIES, arXiv 2306.01708; DARE, arXiv 2311.03099), each
factor weighted by the square root of weight · scaling, as in ``LoraModel.add_weighted_adapter``. The result has a scaling of 1 for
every module, whatever scaling rule and patterns the adapters had.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.utils import merge_utils
from safetensors import safe_open
from safetensors.torch import save_file

from slipway.errors import ModelMergeError
from slipway.model.adapters.saved import Pair
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS, travelling_files
from slipway.model.safetensors_file import TensorInfo
from slipway.stage import Context
from slipway.texts import one_line
from slipway_merge.adapter.adapter import Adapter, read_adapter
from slipway_merge.params import CombineParams

#: Options for more than pairs; they refuse even a checkpoint that has lost the tensors of an option.
_NOT_PLAIN = ("layer_replication", "modules_to_save", "target_parameters", "trainable_token_indices")


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter of a combination."""

    name: str
    folder: Path
    adapter: Adapter
    weight: float


def combine(inputs: Sequence[tuple[str, Path]], output: Path, *, params: CombineParams, ctx: Context) -> None:
    """Combine adapters into the folder ``output``, which must not exist.

    Args:
        inputs: Name and folder of each adapter; tokenizer and other small files are taken from the first.
        output: Folder of the combined adapter.
        params: Parameters of the combination.
        ctx: Progress, cancellation and warnings.

    Raises:
        ModelMergeError, CheckpointValidationError: as listed in this service's README.
    """
    torch.set_num_threads(max(1, ctx.threads))
    parts = _read(inputs, params)
    _check_bases(parts, ctx)
    torch.manual_seed(params.seed)
    tensors = _read_base_weights(parts)
    ranks: dict[str, int] = {}
    modules = sorted({module for part in parts for module in part.adapter.pairs})
    for number, module in enumerate(modules):
        ctx.progress("combine", done=number, total=len(modules), unit="modules")
        pairs = [(part, part.adapter.pairs[module]) for part in parts if module in part.adapter.pairs]
        _check_module(module, pairs, params)
        a, b = _combine_factors(pairs, params)
        ranks[module] = a.shape[0]
        a_name, b_name = _names(module, embedding=pairs[0][1].embedding)
        tensors |= {a_name: a.contiguous(), b_name: b.contiguous()}
    _check_values(tensors)
    output.mkdir()
    save_file(tensors, output / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = _config(parts[0].adapter.config.raw, ranks)
    (output / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _copy_companions(parts[0].folder, output)
    ctx.record(
        combined={part.name: part.weight for part in parts},
        combination_type=params.combination_type,
        modules=len(modules),
        ranks=sorted(set(ranks.values())),
    )


def _read(inputs: Sequence[tuple[str, Path]], params: CombineParams) -> list[_Part]:
    weights = params.weights or (1.0,) * len(inputs)
    if len(weights) != len(inputs) or not all(math.isfinite(weight) and weight for weight in weights):
        raise ModelMergeError(
            f"{len(inputs)} adapters cannot be combined with weights {list(weights)}",
            reason="PARAMS_INVALID",
            remedy="give one finite weight other than 0 per adapter, the checkpoint's first",
            about={"key": "weights"},
        )
    parts = []
    for (name, folder), weight in zip(inputs, weights, strict=True):
        adapter = read_adapter(folder)
        # Biases and modules to save are trained; any other weight is a copy of the base's.
        trained = sorted(w.info.name for w in adapter.whole.values() if w.own or w.name.endswith(".bias"))
        trained += sorted([*adapter.forms, *(info.name for info in adapter.rows.values())])
        trained += sorted(pair.a.name for pair in adapter.experts.values())
        options = [key for key in _NOT_PLAIN if adapter.config.raw.get(key)]
        if trained or options or not adapter.pairs:
            shown = f"{trained[0]!r}, which is more than a pair" if trained else ", ".join(options) or "no LoRA pair"
            raise ModelMergeError(
                f"{name} is not plain LoRA: it has {shown}, which no method of combination covers",
                reason="ADAPTER_UNSUPPORTED",
                remedy="merge this adapter alone, and train the next one on the result",
                about={"adapter": name, "tensor": trained[0] if trained else ""},
            )
        parts.append(_Part(name, folder, adapter, weight))
    return parts


def _read_base_weights(parts: Sequence[_Part]) -> dict[str, torch.Tensor]:
    """Return the base weights that peft saves beside the pairs of a targeted embedding; check that all adapters have the same."""
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[str, str] = {}
    for part in parts:
        for whole in part.adapter.whole.values():
            name, tensor = whole.info.name, _load(whole.info)
            if name in tensors and not torch.equal(tensor, tensors[name]):
                raise ModelMergeError(
                    f"{owners[name]} and {part.name} were saved with different {name!r}: they were trained on different base "
                    "models, or one of them resized the vocabulary",
                    reason="ADAPTER_BASE_MISMATCH",
                    remedy="combine adapters of the same base model",
                    about={"tensor": name, "adapter": part.name},
                )
            tensors[name] = tensor
            owners.setdefault(name, part.name)
    return tensors


def _check_bases(parts: Sequence[_Part], ctx: Context) -> None:
    named = {part.name: part.adapter.config.raw.get("base_model_name_or_path") for part in parts}
    bases = {name: base if isinstance(base, str) else "" for name, base in named.items()}
    if len(set(bases.values())) > 1:
        listed = ", ".join(f"{name}: {one_line(base) or 'not named'}" for name, base in bases.items())
        ctx.warn(f"the combined adapters name different base models ({listed})")


def _check_module(module: str, pairs: Sequence[tuple[_Part, Pair]], params: CombineParams) -> None:
    """Check that all adapters of a module have the same weight shape and, if factors are mixed, the same rank."""
    (first, pair), *others = pairs
    for part, other in others:
        same = other.embedding == pair.embedding and other.a.shape[1:] == pair.a.shape[1:]
        if not (same and other.b.shape[0] == pair.b.shape[0]):
            raise ModelMergeError(
                f"module {module!r} has shapes {pair.a.shape} and {pair.b.shape} in {first.name}, but {other.a.shape} and "
                f"{other.b.shape} in {part.name}: they were trained on different base models",
                reason="ADAPTER_BASE_MISMATCH",
                remedy="combine adapters of the same base model",
                about={"tensor": other.a.name, "adapter": part.name},
            )
        if other.rank != pair.rank and params.combination_type != "cat":
            raise ModelMergeError(
                f"module {module!r} has rank {pair.rank} in {first.name} and {other.rank} in {part.name}: "
                f"{params.combination_type} mixes factors of the same rank only",
                reason="ADAPTER_UNSUPPORTED",
                remedy="combine them with type cat, the exact sum",
                about={"module": module, "adapter": part.name},
            )


def _combine_factors(pairs: Sequence[tuple[_Part, Pair]], params: CombineParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors (r, in) and (out, r) of one module, in float32, for a scaling of 1."""
    first = [_load(pair.a).float() for _, pair in pairs]
    second = [_load(pair.b).float() for _, pair in pairs]
    scales = [part.weight * pair.scaling for part, pair in pairs]
    if params.combination_type == "cat":
        return torch.cat([a * scale for a, scale in zip(first, scales, strict=True)], 0), torch.cat(second, 1)
    roots = torch.tensor([math.sqrt(abs(scale)) for scale in scales])
    signs = torch.tensor([math.copysign(1.0, scale) for scale in scales])
    mix = _mixing_method(params)
    return mix(first, roots * signs), mix(second, roots)  # signs on one factor only, otherwise they would cancel


def _mixing_method(params: CombineParams) -> Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]:
    density, sign = params.density, params.majority_sign_method
    methods: Mapping[str, Callable[..., torch.Tensor]] = {
        "linear": merge_utils.task_arithmetic,
        "ties": partial(merge_utils.ties, density=density, majority_sign_method=sign),
        "dare_linear": partial(merge_utils.dare_linear, density=density),
        "dare_ties": partial(merge_utils.dare_ties, density=density, majority_sign_method=sign),
        "magnitude_prune": partial(merge_utils.magnitude_prune, density=density),
    }
    return methods[params.combination_type]


def _load(info: TensorInfo) -> torch.Tensor:
    with safe_open(info.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(info.name)
    return tensor


def _names(module: str, *, embedding: bool) -> tuple[str, str]:
    kind, suffix = ("lora_embedding_", "") if embedding else ("lora_", ".weight")
    return f"{ADAPTER_PREFIX}{module}.{kind}A{suffix}", f"{ADAPTER_PREFIX}{module}.{kind}B{suffix}"


def _check_values(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelMergeError(
                f"the combined {name!r} holds NaN or infinity",
                reason="NON_FINITE_WEIGHTS",
                remedy="check each adapter with slipway checkpoints, and the weights",
                about={"tensor": name},
            )


def _config(first: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return a configuration that gives every module its rank and a scaling of 1, in peft and in this service."""
    common = max(ranks.values())
    others = {re.escape(module): rank for module, rank in sorted(ranks.items()) if rank != common}
    kept = ("base_model_name_or_path", "revision", "task_type", "peft_version", "auto_mapping")
    return {
        **{key: first[key] for key in kept if key in first},
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_rslora": False,
    }


def _copy_companions(folder: Path, output: Path) -> None:
    for path in travelling_files(folder):
        if path.name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            continue
        target = output / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
