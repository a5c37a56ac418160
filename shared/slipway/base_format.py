"""Whether a base model can be merged into as it is stored, told from its configuration and the headers of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.model_files import CONFIG, has_safetensors
from slipway.safetensors_file import read_weights

METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq")
"""Values of ``quant_method`` that the prepare stage undoes."""

_FLOAT8 = ("F8_E4M3", "F8_E5M2")


def base_format(folder: Path) -> str:
    """How a model is stored, when it has to be prepared before it is merged into; empty for plain 16- or 32-bit safetensors.

    For example ``pickle``, ``fp8``, ``gptq`` or ``pickle gptq``.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``SAFETENSORS_CORRUPT``, or ``BASE_QUANTIZATION_UNSUPPORTED`` when it is
            quantized by a method that is not undone.
    """
    quantization = quantization_of(read_config(folder))
    method = str(quantization.get("quant_method") or "unnamed") if quantization else ""
    if method and method not in METHODS:
        raise CheckpointValidationError(
            f"the base model in {folder} is quantized by {method!r}, which is not brought back to 16 bit",
            reason="BASE_QUANTIZATION_UNSUPPORTED",
            remedy=f"use its 16-bit version; {', '.join(METHODS)} are dequantized",
            about={"file": folder / CONFIG, "quant_method": method},
        )
    if not has_safetensors(folder):
        return f"pickle {method}".strip()
    if not method and any(tensor.dtype in _FLOAT8 for tensor in read_weights(folder).values()):
        return "fp8"
    return method


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a model (older files of compressed-tensors call it ``compression_config``); empty if none."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, dict):
            # Old files of bitsandbytes do not name their method.
            legacy = {"quant_method": "bitsandbytes"} if found.get("load_in_4bit") or found.get("load_in_8bit") else {}
            return legacy | found
    return {}


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path} is not readable JSON ({error})"
    else:
        if isinstance(config, dict):
            return config
        what = f"{path} is not a JSON object"
    raise CheckpointValidationError(
        what, reason="BASE_MODEL_INVALID", remedy="download or copy the base model again", about={"file": path}
    )
