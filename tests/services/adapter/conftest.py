"""A small base, adapters of it, and the stage run in a work folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from slipway.stage import Context
from slipway_adapter.params import AdapterParams
from slipway_adapter.stage import STAGE
from support.models.merge_cases import CONFIGS, make_model, randomise
from support.models.merge_models import make_family

TWO = ["q_proj", "up_proj"]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of :func:`support.models.merge_cases.make_model` by name, each saved once."""
    root = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        folder = root / kind
        if not folder.is_dir():
            (make_model if kind in CONFIGS else make_family)(kind).save_pretrained(folder)
        return folder

    return base


@pytest.fixture
def tune(tmp_path: Path, bases: Callable[[str], Path]) -> Callable[..., Path]:
    """Save an adapter with peft; its factors are random, its scaling is not 1."""

    def save(
        kind: str = "qwen3", *, name: str = "tuned", dtype: torch.dtype = torch.float32, seed: int = 3, **lora: Any
    ) -> Path:
        model = tf.AutoModelForCausalLM.from_pretrained(bases(kind))
        options = {"r": 4, "lora_alpha": 10, "target_modules": TWO, **lora}
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        randomise(tuned, seed=seed)
        tuned.to(dtype).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def deliver(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    def call(base: Path, adapter: Path, *, name: str = "work", **params: Any) -> tuple[Path, Context]:
        workdir = tmp_path / name
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"))
        inputs = {"base": base, "adapter": adapter}
        if "onnx" in params:
            inputs["onnx"] = params.pop("onnx")
        return STAGE.run(inputs, AdapterParams(**params), ctx)["adapter"], ctx

    return call
