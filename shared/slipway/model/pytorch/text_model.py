"""Load a merged model of texts in float32, to be traced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway.errors import CheckpointValidationError, FormatExportError
from slipway.model.config.lengths import position_thresholds
from slipway.model.configuration import ModelConfig
from slipway.model.families import Family, auto_model
from slipway.model.model_facts import CannotBuildError, check_loadable, most_tokens


@dataclass(frozen=True)
class TextModel:
    """A model to trace.

    Attributes:
        model: It, in float32 and evaluation mode, with transformers' plain attention.
        family: Its family.
        positions: Most tokens that it takes in any calls. Beyond the length at which rotary frequencies change, cached keys keep those of
            their call, so results depend on how a text is cut into calls of a fixed length.
    """

    model: Any
    family: Family
    positions: int


def open_text_model(
    folder: Path,
    product: str,
    *,
    title: str,
    error: type[FormatExportError],
) -> TextModel:
    """Load the model of a folder.

    Args:
        folder: A transformers folder with safetensors.
        product: Name of what the format makes, such as ``ExecuTorch program``.
        title: The format's title, for remedies.
        error: The format's class of errors.

    Raises:
        FormatExportError: Of the class ``error``: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """

    def invalid(message: str) -> FormatExportError:
        return error(
            f"transformers cannot load {folder.name!r}: {message}",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete transformers model folder",
            about={"folder": folder.name},
        )

    try:
        config = ModelConfig.read(folder)
    except CheckpointValidationError as fault:
        raise invalid(fault.message) from fault
    family, why = config.family, config.why_no_text_graph(product)
    if why or family is None:
        raise error(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy=f"leave the {title} format out for this model",
            about={"family": config.description, "model_type": config.get("model_type")},
        )
    if config.get("quantization_config"):
        raise error(
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
    ) as fault:  # fmt: skip
        raise invalid(f"{type(fault).__name__}: {fault}") from fault
    positions = min([most_tokens(model), *position_thresholds(model.config.get_text_config())])
    return TextModel(model.eval().requires_grad_(False), family, positions)
