"""Load a merged model in the type in which its graph computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway.errors import CheckpointValidationError, TorchGraphError
from slipway.model.config.lengths import length_thresholds
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family, auto_model
from slipway.model.model_facts import CannotBuildError, check_loadable, most_tokens
from slipway_torchscript.families import refusal_reason

LONGEST_PROOF = 512
"""Longest text that the comparison with PyTorch runs."""


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        model: It, in evaluation mode.
        family: Its family.
        positions: Most tokens that it takes.
        thresholds: Numbers of tokens beyond which its code computes otherwise: windows of attention, lengths of rotary embeddings.
    """

    model: Any
    family: Family
    positions: int
    thresholds: tuple[int, ...]


def open_source(folder: Path, *, dtype: torch.dtype, attention: str) -> Source:
    """Load the model of a folder.

    Raises:
        TorchGraphError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    try:
        config = ModelConfig.read(folder)
    except CheckpointValidationError as error:
        raise _invalid(folder, error.message) from error
    family, why = config.family, refusal_reason(config)
    if why or family is None:
        raise unsupported(why, family=config.description, model_type=config.get("model_type"))
    if config.get("quantization_config"):
        raise TorchGraphError(
            f"the model in {folder.name} is already quantized",
            reason="DTYPE_UNSUPPORTED",
            remedy="export the unquantized model",
            about={"file": "config.json", "key": "quantization_config"},
        )
    try:
        check_loadable(folder, auto_model(family))
        model = _load(folder, family, dtype=dtype, attention=attention)
    except (
        CannotBuildError, CheckpointValidationError, OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError
    ) as error:  # fmt: skip
        raise _invalid(folder, f"{type(error).__name__}: {error}") from error
    model = model.eval().requires_grad_(False)
    settings = model.config.get_text_config()
    return Source(model, family, most_tokens(model), length_thresholds(settings))


def unsupported(why: str, **about: object) -> TorchGraphError:
    """Return the error for a model of which no graph can be made."""
    return TorchGraphError(
        why, reason="FAMILY_UNSUPPORTED", remedy="leave this format out for this model", about=dict(about)
    )


def _load(folder: Path, family: Family, *, dtype: torch.dtype, attention: str) -> Any:
    """Load with the attention that is asked for, or with eager attention if the class has no other."""
    for each in dict.fromkeys((attention, "eager")):
        try:
            return auto_model(family).from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=each,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except ValueError:
            if each == "eager":
                raise
    raise AssertionError


def _invalid(folder: Path, message: str) -> TorchGraphError:
    return TorchGraphError(
        f"transformers cannot load {folder.name!r}: {message}",
        reason="BASE_MODEL_INVALID",
        remedy="give a complete transformers model folder",
        about={"folder": folder.name},
    )


def needs_cache(family: Family) -> bool:
    """Return whether a graph of the family has keys and values of earlier tokens as inputs."""
    return family is DECODER
