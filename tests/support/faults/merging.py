"""A fault that a merge may have, in the folder that it has written."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def swap_layers(merged: Path) -> None:
    """Write the weights of the two layers each in the place of the other, in a folder of one file."""
    file = merged / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    file.unlink()  # the kept folder of the merge may have another link
    save_file(tensors, file, {"format": "pt"})
