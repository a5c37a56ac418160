"""Change the files of a saved adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def edit(folder: Path, *, tensors: Callable[[Tensors], Tensors] | None = None, **settings: Any) -> None:
    """Change the settings or the tensors of a saved adapter."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if tensors is not None:
        weights = folder / "adapter_model.safetensors"
        save_file(tensors(load_file(weights)), weights, metadata={"format": "pt"})


def write(folder: Path, tensors: Tensors, **settings: Any) -> Path:
    """Write an adapter of these tensors."""
    folder.mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 10} | settings))
    return folder
