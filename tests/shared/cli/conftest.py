"""Fixtures that tests of several commands share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a base model, and a training run with a complete and a truncated checkpoint; the files are small but real."""

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.embed_tokens.weight": np.zeros((8, 16), np.float32)}, base / "model.safetensors")
    for step in (5, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": 1.5}]}))
        save_file({"lora": np.zeros((4, 16), np.float32)}, folder / "adapter_model.safetensors")
    newest = tmp_path / "run" / "checkpoint-10" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    return tmp_path / "run"
