"""Write an adapter as peft, vLLM, SGLang and KServe take it, and as it is written for llama.cpp, module by module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway.models.adapters.pairs import Pair
from slipway.models.adapters.saved import Saved
from slipway.models.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from slipway.models.safetensors_layout import TensorSpec, plan_files
from slipway.stage import Context
from slipway_adapter.base import Fitted, fit
from slipway_adapter.companions import copy_tokenizer
from slipway_adapter.factors import Form, common_form, normalized
from slipway_adapter.params import AdapterParams
from slipway_adapter.rules import check_rules, refused

_KEPT = ("base_model_name_or_path", "revision", "task_type", "peft_version")
"""Settings that say what the adapter is of."""


def write_peft_folder(saved: Saved, base: Path, output: Path, params: AdapterParams, ctx: Context) -> None:
    """Write the folder ``output``, which must not exist.

    Raises:
        AdapterExportError, ModelMergeError, CheckpointValidationError: as this service's README lists.
    """
    cautions = check_rules(saved, params.target)
    fitted = fit(saved, base, params.target)
    for caution in (*cautions, *fitted.cautions):
        ctx.warn(caution)
    form = common_form(list(fitted.pairs.values()), params.dtype)
    output.mkdir()
    changed = _write_factors(fitted, form, output, ctx)
    if not changed:
        raise refused("nothing", "all its updates are zero")
    text = json.dumps(_config(saved.raw, form, fitted), indent=2, sort_keys=True)
    (output / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    ctx.record(
        modules=len(fitted.pairs),
        rank=form.rank,
        lora_alpha=form.alpha,
        scaling_folded=form.folded,
        dtype=form.dtype,
        copied=copy_tokenizer(saved.folder, base, output),
    )


def tensor_names(module: str, pair: Pair) -> tuple[str, str]:
    """Return the names under which peft stores the two factors of a module."""
    kind, suffix = ("lora_embedding_", "") if pair.embedding else ("lora_", ".weight")
    return f"{ADAPTER_PREFIX}{module}.{kind}A{suffix}", f"{ADAPTER_PREFIX}{module}.{kind}B{suffix}"


def _write_factors(fitted: Fitted, form: Form, output: Path, ctx: Context) -> bool:
    """Write the factors; return whether any update is not zero."""
    groups, owners = [], dict[str, str]()
    for module, pair in fitted.pairs.items():
        a, b = tensor_names(module, pair)
        groups.append(
            [
                TensorSpec(a, form.dtype, (form.rank, pair.a.shape[1])),
                TensorSpec(b, form.dtype, (pair.b.shape[0], form.rank)),
            ]
        )
        owners |= {a: module, b: module}
    [file] = plan_files(groups, max_shard_bytes=1 << 62)
    changed, current, done = False, "", 0
    factors: dict[str, Any] = {}
    with (output / ADAPTER_WEIGHTS).open("xb") as stream:
        stream.write(file.header)
        for tensor in file.tensors:
            module = owners[tensor.name]
            if module != current:
                ctx.progress("write", done=done, total=len(fitted.pairs), unit="modules")
                pair = fitted.pairs[module]
                factors = dict(zip(tensor_names(module, pair), normalized(pair, form), strict=True))
                changed = changed or (form.alpha != 0 and all(np.any(values) for values in factors.values()))
                current, done = module, done + 1
            stream.write(np.ascontiguousarray(factors[tensor.name]).reshape(-1).view(np.uint8).data)
    return changed


def _config(raw: Mapping[str, Any], form: Form, fitted: Fitted) -> dict[str, Any]:
    """Return settings that mean the same to a reader that knows only rank, alpha and module names."""
    return {
        **{key: raw[key] for key in _KEPT if raw.get(key) is not None},
        "peft_type": "LORA",
        "r": form.rank,
        "lora_alpha": form.alpha,
        "target_modules": list(fitted.targets),
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
