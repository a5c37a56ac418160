"""Tell from configuration and headers whether a base model must be prepared before an adapter can be merged into it."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.model.model_files import CONFIG, has_safetensors, pickle_files
from slipway.model.safetensors_file import read_weights
from slipway.model.sentences import pickled_modules
from slipway.model.tokens.tekken import lacks_tokenizer

METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4")
"""Values of ``quant_method`` that the prepare stage undoes."""

TEKKEN_ONLY = "tekken"

NAME_ITS_KIND = "name its kind, for example base_model.model_type: bert (--set base_model.model_type=bert)"
"""Remedy for a model whose ``config.json`` names no ``model_type``."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")


def base_format(model: ModelFolder) -> str:
    """Return the stored format of a model that must be prepared first; empty for plain 16- or 32-bit safetensors.

    For example ``pickle``, ``fp8``, ``gptq`` or ``pickle gptq``; ``tekken`` is a plain model whose tokenizer only Mistral's library reads.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``SAFETENSORS_CORRUPT``, or ``BASE_QUANTIZATION_UNSUPPORTED`` when it is
            quantized by a method that is not undone.
    """
    folder, quantization = model.path, model.config.quantization
    method = str(quantization.get("quant_method") or "unnamed") if quantization else ""
    if method and method not in METHODS:
        raise CheckpointValidationError(
            f"the base model in {folder} is quantized by {method!r}, which cannot be converted back to 16 bit",
            reason="BASE_QUANTIZATION_UNSUPPORTED",
            remedy=f"use its 16-bit version; {', '.join(METHODS)} are dequantized",
            about={"file": folder / CONFIG, "quant_method": method},
        )
    if not has_safetensors(folder) or pickled_modules(folder):
        return f"pickle {method}".strip()
    if not method and any(tensor.dtype in _FLOAT8 for tensor in model.tensors.values()):
        return "fp8"
    return method or (TEKKEN_ONLY if lacks_tokenizer(folder) else "")


def check_kind(model: ModelFolder, named: str) -> None:
    """Refuse a base model whose kind neither its configuration nor ``named``, the setting, says.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    if not named and not model.config.get("model_type"):
        file = model.path / CONFIG
        raise CheckpointValidationError(
            f"{file} names no model_type, so no library knows what kind of model it is",
            reason="BASE_MODEL_INVALID",
            remedy=NAME_ITS_KIND,
            about={"file": file},
        )


def is_base_format(text: str) -> bool:
    """Return whether a text is a format that :func:`base_format` returns for a model that must be prepared."""
    return text in ("pickle", TEKKEN_ONLY) or text.removeprefix("pickle ") in METHODS


def prepared_sizes(folder: Path) -> list[tuple[int, int]]:
    """Return the weights and bytes of every tensor of a model after preparation; estimated for packed tensors and pickles.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` or ``SAFETENSORS_CORRUPT``.
    """
    config = (
        ModelConfig.read(folder) if (folder / CONFIG).is_file() else ModelConfig({})
    )  # weights alone have a size too
    if not has_safetensors(folder):
        size = sum(path.stat().st_size for path in set(pickle_files(folder).values()))
        rows, columns = config.get("vocab_size"), config.get("hidden_size")
        # A pickle's header is not read; the token embedding is the largest tensor of most models.
        first = min(rows * columns, size // 2) if isinstance(rows, int) and isinstance(columns, int) else size // 2
        return [(first, 2 * first), (size // 2 - first, size - 2 * first)]
    quantization = config.quantization
    bits = quantization.get("bits") or quantization.get("w_bit") or 4
    per_element = {"I32": 32 // bits if bits in (2, 4, 8) else 8, "U8": 2} if quantization else {}
    sizes = []
    for tensor in read_weights(folder).values():
        count = tensor.numel * per_element.get(tensor.dtype, 1)
        packed = tensor.dtype in per_element or tensor.dtype in ("I8", *_FLOAT8)
        sizes.append((count, 2 * count if packed else tensor.nbytes))
    return sizes
