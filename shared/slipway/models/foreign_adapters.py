"""Recognise adapters in another place or form than peft saves: files of other tools, and adapters in subfolders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipway.models.model_files import ADAPTER_CONFIG

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
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            return OtherForm(f"{found[0]} is an adapter of {tool}", remedy)
    return None
