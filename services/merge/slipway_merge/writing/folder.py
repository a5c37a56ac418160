"""The small files of the merged model: configuration, generation settings, tokenizer and chat template, nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.errors import ModelMergeError
from slipway.files.json_documents import read_json
from slipway.models import base_format
from slipway.models.model_files import (
    CHAT_TEMPLATE_FOLDER,
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    LEFTOVERS,
    PROCESSOR_FILES,
    tokenizer_files,
)

#: Safetensors names of data types → names in ``config.json``.
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(base: Path) -> dict[str, Any]:
    """``config.json`` of a base model.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
        ModelMergeError: ``DTYPE_UNSUPPORTED`` for a quantized base.
    """
    config = base_format.read_config(base)
    quantization = base_format.quantization_of(config)
    if quantization:
        method = quantization.get("quant_method", "?")
        raise ModelMergeError(
            f"the base model is quantized ({method}): an adapter merged into rounded weights is mostly lost",
            reason="DTYPE_UNSUPPORTED",
            remedy="run the prepare stage first, as slipway export does, or use the 16-bit version of the base model",
            about={"file": base / CONFIG, "key": "quantization_config", "quant_method": method},
        )
    return config


def merged_config(
    config: Mapping[str, Any], *, dtype: str | None, untied: bool, vocab_size: int | None
) -> dict[str, Any]:
    """The base's configuration, changed only where the merge changed the model.

    Args:
        config: Configuration of the base.
        dtype: New data type as ``config.json`` names it; None keeps what is there.
        untied: Whether formerly tied weights are now written separately.
        vocab_size: New vocabulary size; None when it was not resized.
    """
    merged = {key: value for key, value in config.items() if key not in LEFTOVERS}
    parts = [merged]
    if isinstance(merged.get("text_config"), dict):
        merged["text_config"] = dict(merged["text_config"])
        parts.append(merged["text_config"])
    for part in parts:
        if dtype is not None and (part is merged or "dtype" in part or "torch_dtype" in part):
            part["torch_dtype" if "torch_dtype" in part and "dtype" not in part else "dtype"] = dtype
        if untied and (part is merged or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        if vocab_size is not None and "vocab_size" in part:
            part["vocab_size"] = vocab_size
    return merged


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_small_files(base: Path, adapter: Path, output: Path, *, tokenizer: bool) -> list[str]:
    """Copy generation settings, tokenizer and processor, the checkpoint's own where it has them.

    Tokenizer files are taken from one place, never mixed, except that the base's chat template serves a checkpoint whose
    tokenizer brings none. So are a processor's, which a run that was given the tokenizer alone does not save.

    Returns:
        Names of the copied files, sorted.
    """
    chosen: dict[str, Path] = {}
    generation = next((f / GENERATION_CONFIG for f in (adapter, base) if (f / GENERATION_CONFIG).is_file()), None)
    if generation:
        chosen[GENERATION_CONFIG] = generation
    if tokenizer:
        owner = adapter if _has_tokenizer(adapter) else base
        chosen.update({name: path for name, path in _relative(owner).items() if name not in PROCESSOR_FILES})
        chosen.update(_processor(adapter) or _processor(base))
        if owner is adapter and not _has_template(adapter):
            templates = _relative(base).items()
            chosen.update({name: path for name, path in templates if _is_template(name)})
        if owner is base and _has_template(adapter):
            chosen = {name: path for name, path in chosen.items() if not _is_template(name)}
            chosen.update({name: path for name, path in _relative(adapter).items() if _is_template(name)})
    for name, path in sorted(chosen.items()):
        target = output / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return sorted(chosen)


def _relative(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in tokenizer_files(folder)}


def _is_template(name: str) -> bool:
    return name in CHAT_TEMPLATES or name.startswith(f"{CHAT_TEMPLATE_FOLDER}/")


def _processor(folder: Path) -> dict[str, Path]:
    return {name: path for name, path in _relative(folder).items() if name in PROCESSOR_FILES}


def _has_tokenizer(folder: Path) -> bool:
    return any(not _is_template(name) and name not in PROCESSOR_FILES for name in _relative(folder))


def _has_template(folder: Path) -> bool:
    if any(_is_template(name) for name in _relative(folder)):
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json", lenient=True)
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
