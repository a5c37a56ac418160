"""The description beside an adapter's file, by which a reader finds whether the file is whole."""

from __future__ import annotations

from pathlib import Path

import gguf

from slipway.files.json_documents import LARGEST_LIST, read_json_object

DESCRIPTION = "gguf_adapter.json"
PATTERN = "*-LoRA.gguf"
"""The file, beside which a user may put one of the base."""
HALVES = (".lora_a", ".lora_b")


def missing_weights(folder: Path, file: Path) -> tuple[str, ...]:
    """Return the weights whose factors the description lists and the file lacks, a half of them or both: llama.cpp would not miss them."""
    listed = read_json_object(folder / DESCRIPTION, largest=LARGEST_LIST).get("weights")
    stored = {each.name for each in gguf.GGUFReader(file).tensors}
    wanted = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return tuple(name for name in wanted if any(f"{name}{half}" not in stored for half in HALVES))
