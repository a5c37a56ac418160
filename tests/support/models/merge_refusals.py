"""Change a merge's inputs, and expect its refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from support.models.merge_cases import Case

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def edit_config(case: Case, **changes: Any) -> None:
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Any, name: str = "adapter_model.safetensors") -> None:
    tensors = load_file(folder / name)
    save_file(change(tensors), folder / name, metadata={"format": "pt"})


def refused(case: Case, reason: str, *words: str, **params: Any) -> ModelExportError:
    before = {path: path.read_bytes() for folder in (case.base, case.adapter) for path in folder.iterdir()}
    with pytest.raises(ModelExportError) as caught:
        case.merge(**params)
    assert caught.value.reason == reason
    for word in words:
        assert word in str(caught.value)
    after = {path: path.read_bytes() for folder in (case.base, case.adapter) for path in folder.iterdir()}
    assert after == before
    return caught.value
