"""Adapters that are not where, or not what, peft saves: another tool's files, and adapters in folders of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipway.models.model_files import ADAPTER_CONFIG

#: Files that only one tool writes, the tool, and what makes something of them that can be exported.
_TOOLS = (
    (
        "adapters.safetensors",
        "MLX",
        "convert it to a peft adapter; what mlx_lm.fuse makes of it is a whole model, which is exported without a checkpoint (slipway export --base-model DIR)",
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
class ForeignAdapter:
    """What a folder holds instead of a peft adapter, and what to do about it."""

    message: str
    remedy: str


def foreign_adapter(folder: Path) -> ForeignAdapter | None:
    """What a folder without a peft adapter holds instead; None when nothing is recognised.

    peft gives every adapter a folder named after it, except the one that is called ``default``.
    """
    named = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    if named:
        folders = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        return ForeignAdapter(f"there are adapters in folders of their own ({folders})", f"name {folder / named[0]}")
    for pattern, tool, remedy in _TOOLS:
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            return ForeignAdapter(f"{found[0]} is an adapter of {tool}", remedy)
    return None
