"""The files of sentence-transformers beside a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_modules(
    folder: Path,
    *,
    modules: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    normalized: bool = False,
    dense: Mapping[str, Any] | None = None,
) -> Path:
    """Write a list of modules, by default a pooling of the mean, as sentence-transformers does; ``dense`` has the settings of linear layers."""
    names = modules if modules is not None else ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    folder.mkdir(parents=True, exist_ok=True)
    listed = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))
    for each in listed[1:]:
        place = folder / str(each["path"])
        place.mkdir(exist_ok=True)
        kind = str(each["type"]).rpartition(".")[2]
        if kind != "Normalize":
            (place / "config.json").write_text(json.dumps({"Pooling": settings, "Dense": dense}.get(kind) or {}))
    return folder


def write_prompts(folder: Path, prompts: Mapping[str, str], default: str | None = None) -> Path:
    """Write the settings of sentence-transformers with the prompts of a model."""
    settings = {"prompts": dict(prompts), "default_prompt_name": default, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def write_dense(folder: Path, sizes: tuple[int, int], *, bias: bool, seed: int) -> dict[str, Any]:
    """Write the weights of a linear layer from the first size to the second into a module's folder, and return them."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(sizes[::-1], generator=draw) / sizes[0] ** 0.5}
    if bias:
        weights["linear.bias"] = torch.randn(sizes[1], generator=draw)
    save_file(weights, folder / "model.safetensors")
    return weights
