"""Write an adapter as peft, vLLM, SGLang and KServe take it, and as it is written for llama.cpp, module by module."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipway.files.links import real_file
from slipway.model.adapters.pairs import Pair
from slipway.model.adapters.saved import Saved
from slipway.model.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    chat_templates,
    has_chat_template,
    is_chat_template,
    tokenizer_files,
)
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec, plan_files
from slipway.stage import Context
from slipway_adapter.base import Fitted, fit
from slipway_adapter.factors import Form, common_form, normalized, own_form
from slipway_adapter.params import AdapterParams
from slipway_adapter.rules import LLAMA, check_rules, refused

_KEPT = ("base_model_name_or_path", "revision", "task_type", "peft_version")
"""Settings that say what the adapter is of."""
T = TypeVar("T")


def write_peft_folder(saved: Saved, base: Path, output: Path, params: AdapterParams, ctx: Context) -> None:
    """Write the folder ``output``, which must not exist.

    Raises:
        AdapterExportError, ModelMergeError, CheckpointValidationError: as this service's README lists.
    """
    cautions = check_rules(saved, params.target)
    fitted = fit(saved, base, params.target)
    for caution in (*cautions, *fitted.cautions):
        ctx.warn(caution)
    forms = _forms(fitted, params)
    output.mkdir()
    changed = _write_factors(fitted, forms, output, ctx)
    if not changed:
        raise refused("nothing", "all its updates are zero")
    text = json.dumps(_config(saved.raw, forms, fitted), indent=2, sort_keys=True)
    (output / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    ctx.record(
        modules=len(fitted.pairs),
        rank=max(form.rank for form in forms.values()),
        lora_alpha=_usual(form.alpha for form in forms.values()),
        scaling_folded=any(form.folded for form in forms.values()),
        dtype=_usual(form.dtype for form in forms.values()),
        copied=copy_tokenizer(saved.folder, base, output),
    )


def _forms(fitted: Fitted, params: AdapterParams) -> Mapping[str, Form]:
    """Return the form of each module's pair: one for all where servers read it, its own where llama.cpp's file is made of it."""
    if params.target in LLAMA:
        return {module: own_form(pair) for module, pair in fitted.pairs.items()}
    return dict.fromkeys(fitted.pairs, common_form(list(fitted.pairs.values()), params.dtype))


def _usual(values: Iterable[T]) -> T:
    """Return the value that most have; of several the first."""
    return Counter(values).most_common(1)[0][0]


def tensor_names(module: str, pair: Pair) -> tuple[str, str]:
    """Return the names under which peft stores the two factors of a module."""
    kind, suffix = ("lora_embedding_", "") if pair.embedding else ("lora_", ".weight")
    return f"{ADAPTER_PREFIX}{module}.{kind}A{suffix}", f"{ADAPTER_PREFIX}{module}.{kind}B{suffix}"


def _write_factors(fitted: Fitted, forms: Mapping[str, Form], output: Path, ctx: Context) -> bool:
    """Write the factors; return whether any update is not zero."""
    groups, owners = [], dict[str, str]()
    for module, pair in fitted.pairs.items():
        a, b = tensor_names(module, pair)
        form = forms[module]
        groups.append(
            [
                TensorSpec(a, form.dtype, (form.rank, pair.a.shape[1])),
                TensorSpec(b, form.dtype, (pair.b.shape[0], form.rank)),
            ]
        )
        owners |= {a: module, b: module}
    [file] = plan_files(groups, max_shard_bytes=1 << 62)
    changes: dict[str, bool] = {}  # by module, in the order of the file

    @lru_cache(maxsize=1)  # both factors of a module are written one after the other
    def factors(module: str) -> dict[str, Any]:
        ctx.progress("write", done=len(changes), total=len(fitted.pairs), unit="modules")
        pair, form = fitted.pairs[module], forms[module]
        both = dict(zip(tensor_names(module, pair), normalized(pair, form), strict=True))
        changes[module] = form.alpha != 0 and all(np.any(values) for values in both.values())
        return both

    def values(tensor: TensorInfo) -> Iterator[memoryview]:
        yield np.ascontiguousarray(factors(owners[tensor.name])[tensor.name]).reshape(-1).view(np.uint8).data

    for _ in file.write(output / ADAPTER_WEIGHTS, values):
        ctx.check_cancelled()
    return any(changes.values())


def _config(raw: Mapping[str, Any], forms: Mapping[str, Form], fitted: Fitted) -> dict[str, Any]:
    """Return settings that mean the same to a reader that knows only rank, alpha and module names, if there is one form for all."""
    rank, alpha = _usual(form.rank for form in forms.values()), _usual(form.alpha for form in forms.values())
    return {
        **{key: raw[key] for key in _KEPT if raw.get(key) is not None},
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(fitted.targets),
        "rank_pattern": {_exactly(name): form.rank for name, form in forms.items() if form.rank != rank},
        "alpha_pattern": {_exactly(name): form.alpha for name, form in forms.items() if form.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _exactly(module: str) -> str:
    """Return a pattern that matches this module and no other whose name ends like it."""
    return f"^{re.escape(module)}"


def copy_tokenizer(adapter: Path, base: Path, output: Path) -> list[str]:
    """Copy the checkpoint's tokenizer if it has one, otherwise the base's; the base's chat template if the checkpoint has none.

    Returns:
        Names of the copied files, sorted.
    """
    tokenizer = adapter if any(not is_chat_template(name) for name in _names(adapter)) else base
    chosen = {name: tokenizer for name in _names(tokenizer) if not is_chat_template(name)}
    written: dict[str, bytes] = {}
    if tokenizer is adapter and not has_chat_template(adapter):
        written = chat_templates(base)  # also those among the settings of the base's tokenizer, which do not travel
    else:
        templates = adapter if has_chat_template(adapter) else base
        chosen |= {name: templates for name in _names(templates) if is_chat_template(name)}
    for name, folder in chosen.items():
        target = output / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_file(folder, name), target)
    for name, text in written.items():
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(text)
    return sorted({*chosen, *written})


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in tokenizer_files(folder)]
