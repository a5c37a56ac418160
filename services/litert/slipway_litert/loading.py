"""Load a merged model in float32, in the form that is traced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway.errors import CheckpointValidationError, LiteRtExportError
from slipway.models.base_format import read_config
from slipway.models.families import Family, auto_model, described, family_of
from slipway.models.model_facts import CannotBuildError, check_loadable, most_tokens
from slipway_litert.attention import use_grouped_attention
from slipway_litert.families import refusal_reason


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        model: It, in float32 and evaluation mode.
        family: Its family.
        positions: Most tokens that it takes.
        padding: Token in places without one.
    """

    model: Any
    family: Family
    positions: int
    padding: int


def open_source(folder: Path) -> Source:
    """Load the model of a folder.

    Raises:
        LiteRtExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    try:
        config = read_config(folder)
    except CheckpointValidationError as error:
        raise _invalid(folder, error.message) from error
    family, why = family_of(config), refusal_reason(config)
    if why or family is None:
        raise LiteRtExportError(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the LiteRT format out for this model",
            about={"family": described(config), "model_type": config.get("model_type")},
        )
    if config.get("quantization_config"):
        raise LiteRtExportError(
            f"the model in {folder.name} is already quantized",
            reason="DTYPE_UNSUPPORTED",
            remedy="export the unquantized model",
            about={"file": "config.json", "key": "quantization_config"},
        )
    try:
        check_loadable(folder, auto_model(family))
        model = auto_model(family).from_pretrained(
            str(folder),
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (
        CannotBuildError, CheckpointValidationError, OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError
    ) as error:  # fmt: skip
        raise _invalid(folder, f"{type(error).__name__}: {error}") from error
    padding = model.config.get_text_config().pad_token_id
    model = model.eval().requires_grad_(False)
    use_grouped_attention(model)
    return Source(model, family, most_tokens(model), padding if isinstance(padding, int) else 0)


def _invalid(folder: Path, message: str) -> LiteRtExportError:
    return LiteRtExportError(
        f"transformers cannot load {folder.name!r}: {message}",
        reason="BASE_MODEL_INVALID",
        remedy="give a complete transformers model folder",
        about={"folder": folder.name},
    )
