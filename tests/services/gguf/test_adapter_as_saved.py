"""An adapter as trainings save it becomes a file with which llama.cpp computes what peft computes: through both stages, as the format plans them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_adapter.params import AdapterParams
from slipway_adapter.stage import STAGE
from support.models.gguf_models import (
    llama_distributions,
    save_adapter,
    save_family,
    torch_distributions,
    write_adapter,
    write_gguf,
)
from support.models.gguf_sizes import VOCABULARY
from support.models.saved_adapters import edit

pytestmark = pytest.mark.own_process

_TOKENS = np.random.default_rng(3).integers(3, VOCABULARY, 24).tolist()
_PATTERNS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"q_proj": 8, "down_proj": 2}}


def prepared(base: Path, adapter: Path, work: Path) -> Path:
    """Run the stage that goes before."""
    work.mkdir()
    return STAGE.run({"base": base, "adapter": adapter}, AdapterParams(target="gguf"), Context(workdir=work))["adapter"]


@pytest.mark.parametrize(
    ("family", "lora", "rename", "ranks"),
    [
        ("gpt2", {}, str, {4}),  # whose Conv1D servers do not wrap
        ("llama", {**_PATTERNS, "alpha_pattern": {"0.self_attn.v_proj": 3}, "use_rslora": True}, str, {2, 4, 8}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}, str, {4}),
        ("qwen3", {}, lambda name: f"module.{name.replace('.weight', '.default.weight')}", {4}),
    ],
    ids=["conv1d", "ranks-and-scalings", "embedding-and-head", "names"],
)
def test_distributions_are_those_of_peft(
    family: str, lora: dict[str, Any], rename: Callable[[str], str], ranks: set[int], tmp_path: Path
) -> None:
    model = save_family(family, tmp_path / "base")
    expected = torch_distributions(save_adapter(model, tmp_path / "saved", **lora), _TOKENS)
    edit(tmp_path / "saved", tensors=lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    folder = prepared(tmp_path / "base", tmp_path / "saved", tmp_path / "first")
    file, _ = write_adapter(tmp_path / "base", folder, tmp_path / "second")
    base, _ = write_gguf(tmp_path / "base", tmp_path / "file", level="f32")
    found = llama_distributions(base, _TOKENS, adapter=file)
    assert np.abs(found - expected).max() < (5e-3 if family == "gpt2" else 2e-5)
    halves = {each.name: tuple(each.shape) for each in gguf.GGUFReader(file).tensors}
    stored = {int(shape[0]) for name, shape in halves.items() if name.endswith(".lora_b")}
    assert stored == ranks  # nothing is padded


def test_factors_keep_their_type(tmp_path: Path) -> None:
    model = save_family("qwen3", tmp_path / "base")
    save_adapter(model, tmp_path / "saved", dtype=torch.float16, target_modules=["k_proj"], lora_alpha=3)
    file, _ = write_adapter(
        tmp_path / "base", prepared(tmp_path / "base", tmp_path / "saved", tmp_path / "first"), tmp_path / "second"
    )
    assert file.name == "tiny-F16-LoRA.gguf"


@pytest.mark.parametrize(
    ("family", "lora", "rule"),
    [
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}, "tied"),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}, "tied"),
        ("qwen3moe", {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"]}, "experts"),
        ("llama", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
        ("llama", {"use_dora": True, "target_modules": ["q_proj"]}, "dora"),
    ],
    ids=["embedding", "head", "experts", "modules_to_save", "dora"],
)
def test_what_llama_cannot_take_is_refused_by_name(
    family: str, lora: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    model = save_family(family, tmp_path / "base")
    save_adapter(model, tmp_path / "saved", **lora)
    with pytest.raises(ModelExportError) as refused:
        prepared(tmp_path / "base", tmp_path / "saved", tmp_path / "first")
    assert (refused.value.reason, refused.value.about["rule"]) == ("ADAPTER_NOT_SERVABLE", rule)
    assert "merged model" in refused.value.remedy
    assert "vLLM" not in refused.value.message
