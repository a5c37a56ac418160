"""Change stored tensors of tiny models in place, and tell which belong to their multi-token heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
BEHIND_THE_LAST = "model.layers.3."
"""Where the tiny DeepSeek-V3 and GLM-4 store their head."""


def is_of_head(kind: str, name: str) -> bool:
    """Return whether a tensor of a kind of :mod:`support.models.current_kinds` belongs to its head."""
    return name.startswith("mtp." if kind.startswith("qwen") else BEHIND_THE_LAST)


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Change the tensors of a folder in place, and return it."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def drop(wanted: Callable[[str], bool]) -> Callable[[Tensors], None]:
    """Return a change that takes tensors away."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if wanted(name)]:
            del tensors[name]

    return change
