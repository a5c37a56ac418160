"""Load a merged model in the type in which its graph computes."""

from __future__ import annotations

from pathlib import Path

import torch

from slipway.errors import TorchGraphError
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway_torchscript.families import refusal_reason

LONGEST_PROOF = 512
"""Longest text that the comparison with PyTorch runs."""


def open_source(folder: Path, *, title: str, dtype: torch.dtype, attention: str) -> TextModel:
    """Load the model of a folder.

    Raises:
        TorchGraphError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    return open_text_model(folder, refusal_reason, title=title, error=TorchGraphError, dtype=dtype, attention=attention)


def unsupported(why: str, **about: object) -> TorchGraphError:
    """Return the error for a model of which no graph can be made."""
    return TorchGraphError(
        why, reason="FAMILY_UNSUPPORTED", remedy="leave this format out for this model", about=dict(about)
    )
