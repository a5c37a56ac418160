"""Write the small files of the merged model: only configuration, generation settings, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError, ModelMergeError
from slipway.files.json_documents import read_object_or_empty
from slipway.model.dtypes import DTYPES, FLOATS
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.folder import ModelFolder
from slipway.model.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    LEFTOVERS,
    PROCESSOR_FILES,
    TOKENIZER_SETTINGS,
    chat_templates,
    is_chat_template,
    tokenizer_files,
)
from slipway.model.sentences import MODULE_PICKLE, MODULES, is_sentence_encoder, module_files, sentence_files
from slipway.model.tokens.byte_level import complete_tokenizer
from slipway.model.tokens.tekken import TOKENIZER

#: Safetensors names of data types → names in ``config.json``.
DTYPE_NAMES = {name: DTYPES[name].torch for name in FLOATS}


def open_base(base: Path) -> ModelFolder:
    """Open the folder of a base model.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
        ModelMergeError: ``DTYPE_UNSUPPORTED`` for a quantized base.
    """
    model = ModelFolder.open(base)
    quantization = model.config.quantization
    if quantization:
        method = quantization.get("quant_method", "?")
        raise ModelMergeError(
            f"the base model is quantized ({method}): most of an adapter merged into rounded weights would be lost",
            reason="DTYPE_UNSUPPORTED",
            remedy="run the prepare stage first, as slipway export does, or use the 16-bit version of the base model",
            about={"file": base / CONFIG, "key": "quantization_config", "quant_method": method},
        )
    return model


def merged_config(config: Mapping[str, Any], *, dtype: str, untied: bool, vocab_size: int | None) -> dict[str, Any]:
    """Return the base's configuration, changed only where the merge changed the model.

    Args:
        config: Configuration of the base.
        dtype: Data type as ``config.json`` names it.
        untied: Whether formerly tied weights are now written separately.
        vocab_size: New vocabulary size; None if it was not resized.
    """
    merged = {key: value for key, value in config.items() if key not in LEFTOVERS}
    parts = [merged]
    if isinstance(merged.get("text_config"), dict):
        merged["text_config"] = dict(merged["text_config"])
        parts.append(merged["text_config"])
    for part in parts:
        if part is merged or "dtype" in part or "torch_dtype" in part:
            part["torch_dtype" if "torch_dtype" in part and "dtype" not in part else "dtype"] = dtype
        if untied and (part is merged or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        if vocab_size is not None and "vocab_size" in part:
            part["vocab_size"] = vocab_size
    return merged


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_small_files(base: ModelFolder, adapter: Path, output: ModelFolder, *, tokenizer: bool) -> list[str]:
    """Copy generation settings, pooling, tokenizer and processor from the checkpoint if it has them, otherwise from the base.

    A model that got a new head is no sentence encoder any more. Tokenizer files come from one folder and are never mixed, except that a
    checkpoint whose tokenizer has no chat template gets the base's. The files of a processor come from one folder, too; a run that only
    loaded the tokenizer does not save them.

    Returns:
        Names of the copied files, sorted.
    """
    chosen: dict[str, Path] = {}
    folders, made = (adapter, base.path), output.config
    generation = next((f / GENERATION_CONFIG for f in folders if (f / GENERATION_CONFIG).is_file()), None)
    if generation:
        chosen[GENERATION_CONFIG] = generation
    same = base.config.get("architectures") == made.get("architectures")
    encoder = next((folder for folder in folders if sentence_files(folder)), base.path)
    # Files of a sentence encoder would say that this model is one.
    if made.family is FEATURE_EXTRACTION or (same and not is_sentence_encoder(encoder)):
        chosen |= _modules_of(encoder, base.path)
    written: dict[str, bytes] = {}
    if tokenizer:
        own, others = _group_by_kind(adapter), _group_by_kind(base.path)
        chosen |= (own["tokenizer"] or others["tokenizer"]) | (own["processor"] or others["processor"])
        if _has_template(adapter, own["template"]):
            chosen |= own["template"]
        elif own["tokenizer"]:  # take only the templates from the settings of the base's tokenizer
            written = chat_templates(base.path)
        else:
            chosen |= others["template"]
    for name, path in sorted(chosen.items()):
        target = output.path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    for name, text in written.items():
        (output.path / name).parent.mkdir(exist_ok=True)
        (output.path / name).write_bytes(text)
    # mistral-common saves tekken.json alone.
    made_files = (TOKENIZER, TOKENIZER_SETTINGS) if complete_tokenizer(output.path) else ()
    return sorted({*chosen, *written, *made_files})


def _modules_of(encoder: Path, base: Path) -> dict[str, Path]:
    """Return the files of a sentence encoder by name; refuse it if a part is missing.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` or ``UNSAFE_PICKLE``.
    """
    chosen, missing = module_files(encoder, base)
    pickles = sorted(name for name in chosen if name.endswith(f"/{MODULE_PICKLE}"))
    if missing:
        raise CheckpointValidationError(
            f"{MODULES} names the module {missing[0]!r}, and neither the checkpoint nor the base model has its files",
            reason="BASE_MODEL_INVALID",
            remedy="copy the folder from the model that was trained, or take the module out of the list",
            about={"file": encoder / MODULES},
        )
    if pickles:
        raise CheckpointValidationError(
            f"the checkpoint's {pickles[0]} is a pickle, which can run code when it is loaded",
            reason="UNSAFE_PICKLE",
            remedy="save the checkpoint with sentence-transformers 3 or newer, which writes safetensors",
            about={"file": encoder / pickles[0]},
        )
    return chosen


def _group_by_kind(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the files of a folder's tokenizer, chat template and processor by their names in it."""
    files: dict[str, dict[str, Path]] = {"tokenizer": {}, "template": {}, "processor": {}}
    for path in tokenizer_files(folder):
        name = path.relative_to(folder).as_posix()
        files["template" if is_chat_template(name) else "processor" if name in PROCESSOR_FILES else "tokenizer"][
            name
        ] = path
    return files


def _has_template(folder: Path, files: Mapping[str, Path]) -> bool:
    """Return whether a tokenizer has a chat template, in a file or among its settings."""
    return bool(files or read_object_or_empty(folder / TOKENIZER_SETTINGS).get("chat_template"))
