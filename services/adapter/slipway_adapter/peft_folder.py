"""Write an adapter, module by module, with its tokenizer: for peft, vLLM, SGLang and KServe, or for the stage that writes it for llama.cpp."""

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

from slipway.files.paths import real_file
from slipway.model.adapters.saved import Pair, Saved
from slipway.model.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    TOKENIZER_SETTINGS,
    chat_templates,
    has_chat_template,
    is_chat_template,
    tokenizer_files,
)
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec, plan_files
from slipway.model.sentences import MODULE_PICKLE, is_sentence_encoder, module_files
from slipway.model.tokens.byte_level import complete_tokenizer
from slipway.model.tokens.tekken import TOKENIZER
from slipway.stage import Context
from slipway_adapter.base import Fitted, fit
from slipway_adapter.factors import Form, common_form, normalize, own_form
from slipway_adapter.params import AdapterParams
from slipway_adapter.rules import LLAMA, check_rules, refusal_error

_KEPT = ("base_model_name_or_path", "revision", "task_type", "peft_version")
"""Settings that describe the adapter's origin; they are kept."""
_WITHOUT_HEAD = (None, "FEATURE_EXTRACTION")
"""Tasks of adapters that leave a sentence encoder what it is."""
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
        raise refusal_error("nothing", "all its updates are zero")
    text = json.dumps(_config(saved.raw, forms, fitted), indent=2, sort_keys=True)
    (output / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    ctx.record(
        modules=len(fitted.pairs),
        rank=max(form.rank for form in forms.values()),
        lora_alpha=_most_common(form.alpha for form in forms.values()),
        scaling_folded=any(form.folded for form in forms.values()),
        dtype=_most_common(form.dtype for form in forms.values()),
        copied=[*copy_tokenizer(saved.folder, base, output), *_copy_modules(saved, base, output, params)],
    )


def _forms(fitted: Fitted, params: AdapterParams) -> Mapping[str, Form]:
    """Return the form of each module's pair: its own for llama.cpp, one common form for servers."""
    if params.target in LLAMA:
        return {module: own_form(pair) for module, pair in fitted.pairs.items()}
    return dict.fromkeys(fitted.pairs, common_form(list(fitted.pairs.values()), params.dtype))


def _most_common(values: Iterable[T]) -> T:
    """Return the most common value, or the first of several."""
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
        both = dict(zip(tensor_names(module, pair), normalize(pair, form), strict=True))
        changes[module] = form.alpha != 0 and all(np.any(values) for values in both.values())
        return both

    def values(tensor: TensorInfo) -> Iterator[memoryview]:
        yield np.ascontiguousarray(factors(owners[tensor.name])[tensor.name]).reshape(-1).view(np.uint8).data

    for _ in file.write(output / ADAPTER_WEIGHTS, values):
        ctx.check_cancelled()
    return any(changes.values())


def _config(raw: Mapping[str, Any], forms: Mapping[str, Form], fitted: Fitted) -> dict[str, Any]:
    """Return the settings. If all pairs have one form, a reader needs to know only rank, alpha and module names."""
    rank, alpha = (
        _most_common(form.rank for form in forms.values()),
        _most_common(form.alpha for form in forms.values()),
    )
    return {
        **{key: raw[key] for key in _KEPT if raw.get(key) is not None},
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(fitted.targets),
        "rank_pattern": {_exact_pattern(name): form.rank for name, form in forms.items() if form.rank != rank},
        "alpha_pattern": {_exact_pattern(name): form.alpha for name, form in forms.items() if form.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _exact_pattern(module: str) -> str:
    """Return a pattern that matches this module, but no other whose name ends with this one's."""
    return f"^{re.escape(module)}"


def copy_tokenizer(adapter: Path, base: Path, output: Path) -> list[str]:
    """Copy the checkpoint's tokenizer, or the base's if it has none; do the same with the chat template.

    Returns:
        Names of the copied files, sorted.
    """
    tokenizer = adapter if any(not is_chat_template(name) for name in _names(adapter)) else base
    chosen = {name: tokenizer for name in _names(tokenizer) if not is_chat_template(name)}
    written: dict[str, bytes] = {}
    if tokenizer is adapter and not has_chat_template(adapter):
        written = chat_templates(base)  # also those in the settings of the base's tokenizer, which are not copied
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
    made = (TOKENIZER, TOKENIZER_SETTINGS) if complete_tokenizer(output, source=tokenizer) else ()
    return sorted({*chosen, *written, *made})


def _copy_modules(saved: Saved, base: Path, output: Path, params: AdapterParams) -> list[str]:
    """Copy pooling and prompts of a sentence encoder, so that sentence-transformers opens the adapter; return the names of the files.

    They are the checkpoint's, otherwise the base's, unless the adapter has trained a head.
    """
    encoder = saved.folder if is_sentence_encoder(saved.folder) else base
    if params.target in LLAMA or saved.raw.get("task_type") not in _WITHOUT_HEAD or not is_sentence_encoder(encoder):
        return []
    chosen, _ = module_files(encoder, base)
    kept = {name: path for name, path in chosen.items() if not name.endswith(MODULE_PICKLE)}
    for name, path in kept.items():
        (output / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, output / name)
    return sorted(kept)


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in tokenizer_files(folder)]
