"""Faults that a merge may have, in the folder that it has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, Any]


def lose_layer(merged: Tensors, base: Tensors) -> None:
    """Leave the second layer as the base has it."""
    merged.update({name: value for name, value in base.items() if ".layers.1." in name})


def swap_layers(merged: Tensors, base: Tensors) -> None:
    """Write the weights of the two layers each in the place of the other."""
    for name in [name for name in merged if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        merged[name], merged[other] = merged[other], merged[name]


def merge_nothing(merged: Tensors, base: Tensors) -> None:
    """Write the base."""
    merged.update(base)


def plant_nan(merged: Tensors, base: Tensors) -> None:
    """Write one NaN."""
    weight = merged["model.layers.1.mlp.down_proj.weight"].clone()
    weight[3, 5] = torch.nan
    merged["model.layers.1.mlp.down_proj.weight"] = weight


PLANTED: Mapping[str, Callable[[Tensors, Tensors], None]] = {
    "a lost layer": lose_layer,
    "swapped layers": swap_layers,
    "nothing merged": merge_nothing,
    "NaN": plant_nan,
}


def plant(name: str, *, base: Path, merged: Path) -> None:
    """Plant a fault into a merged folder of one file."""
    file = merged / "model.safetensors"
    tensors = load_file(file)
    PLANTED[name](tensors, load_file(base / file.name))
    file.unlink()  # the kept folder of the merge may have another link
    save_file(tensors, file, {"format": "pt"})
