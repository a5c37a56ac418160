"""Recognise adapters in another place or form than peft saves: files of other tools, and adapters in subfolders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ModelExportError
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX
from slipway.model.safetensors_file import read_safetensors

#: Files that only one tool writes, the tool, and how to convert them.
_TOOLS = (
    (
        "adapters.safetensors",
        "MLX",
        "convert it to a peft adapter, or fuse it with mlx_lm.fuse into a whole model, which is exported without a checkpoint (slipway export --base-model DIR)",
    ),
    (
        "adapter_[0-9]*.pt",
        "torchtune",
        "save it with torchtune's FullModelHFCheckpointer, which writes peft's files too",
    ),
    (
        "*.nemo",
        "NeMo",
        "convert it with NeMo to a peft adapter, or merge it there, and take the result to single stages (slipway stage)",
    ),
)


@dataclass(frozen=True, slots=True)
class OtherForm:
    """Description of what a folder holds instead of a peft adapter's files, and the remedy."""

    message: str
    remedy: str


def foreign_adapter(folder: Path) -> OtherForm | None:
    """Return what a folder holds instead of a peft adapter; None if nothing is recognised.

    peft saves every adapter in a subfolder with its name, except the one named ``default``.
    """
    named = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    if named:
        folders = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        return OtherForm(f"there are adapters in subfolders ({folders})", f"name {folder / named[0]}")
    for pattern, tool, remedy in _TOOLS:
        files = sorted(path.name for path in folder.glob(pattern))
        if files:
            return OtherForm(f"{files[0]} is an adapter of {tool}", remedy)
    return None


_IMAGES = (
    (("lora_unet_", "lora_te"), "kohya's scripts"),
    (("unet.", "transformer.", "text_encoder.", "text_encoder_2."), "diffusers"),
)
"""Beginnings of the names in files with the LoRA of an image model, and what writes them."""


def foreign_file(path: Path) -> OtherForm:
    """Return what a file holds that is named where the folder of a checkpoint belongs."""
    plain = OtherForm(f"{path} is a file", "name the folder of a training run, or of one checkpoint")
    if path.suffix != ".safetensors":
        return plain
    try:
        names = list(read_safetensors(path).tensors)
    except (ModelExportError, OSError):
        return OtherForm(f"{path} is a file, and cannot be read as safetensors", plain.remedy)
    for beginnings, tool in _IMAGES:
        if names and all(name.startswith(beginnings) for name in names):
            what = f"{path} is the LoRA of an image model, as {tool} writes it"
            return OtherForm(
                what, "slipway exports models of text and speech; fuse this one with diffusers (fuse_lora)"
            )
    if any(name.startswith(ADAPTER_PREFIX) for name in names):
        if (path.parent / ADAPTER_CONFIG).is_file():
            return OtherForm(f"{path} is a file of a checkpoint", f"name its folder: {path.parent}")
        what = f"{path} has the weights of an adapter, and no {ADAPTER_CONFIG} beside it says its rank and scale"
        return OtherForm(what, f"put the {ADAPTER_CONFIG} that was saved with it beside it, and name their folder")
    return OtherForm(
        f"{path} is a file of weights, not a checkpoint's folder",
        "name the folder with its config.json as --base-model to export a whole model, or a folder with adapter_config.json",
    )
