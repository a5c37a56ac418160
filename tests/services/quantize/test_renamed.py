"""Models whose weights transformers renames while it loads them keep the names of their checkpoint, which serving tools know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway.stage import Context
from support.models.current_kinds import make_kind

Quantize = Callable[..., tuple[Path, Context]]
KINDS = {
    "qwen2.5-vl": ("AutoModelForImageTextToText", "model.layers.0.self_attn.q_proj", "visual."),
    "gemma3-vision": ("AutoModelForImageTextToText", "language_model.model.layers.0.self_attn.q_proj", "vision_tower."),
    "nemotron-h": ("AutoModelForCausalLM", "backbone.layers.0.mixer.in_proj", "backbone.embeddings."),
}


def compute(folder: Path, auto_class: str) -> torch.Tensor:
    """Return the logits of a folder as transformers loads it by itself."""
    model, loading = getattr(tf, auto_class).from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(torch.arange(3, 27)[None]).logits.float()


@pytest.mark.parametrize("level", ["int8", "int4", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_quantized_weights_have_the_names_of_the_checkpoint(
    quantize: Quantize, tmp_path: Path, name: str, level: str
) -> None:
    source = make_kind(name, tmp_path / "kind").base
    auto_class, module, untouched = KINDS[name]
    output, ctx = quantize(source, format="pytorch", level=level, group_size=16)
    assert ctx.facts["check"] == "passed"
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    report = json.loads((output / "quantization.json").read_text())
    rounded = {name for name in before if name not in after}
    assert f"{module}.weight" in rounded or f"{module}.weight_scale" in after
    assert {each.rpartition(".")[0] for each in after} >= {each.removesuffix(".weight") for each in rounded}
    assert all(f"{each.removesuffix('.weight')}.weight_scale" in after for each in rounded)
    assert all(torch.equal(before[each], after[each]) for each in before if each.startswith(untouched))
    assert any(each.startswith(untouched) for each in before)
    assert {*report["tensors"]["quantized"]} <= before.keys()
    if level != "fp8":  # it rounds the inputs too
        dense, _ = quantize(source, format="pytorch", level=level, group_size=16, packed=False)
        assert load_file(dense / "model.safetensors").keys() == before.keys()
        found, wanted = compute(output, auto_class), compute(dense, auto_class)
        exact = compute(source, auto_class)
        assert (found - wanted).abs().max() < 0.02 * exact.std()
        assert (found - exact).abs().max() > 0


def test_layers_that_keep_their_type_are_named_as_transformers_names_them(quantize: Quantize, tmp_path: Path) -> None:
    source = make_kind("qwen2.5-vl", tmp_path / "kind").base
    kept = "model.language_model.layers.0.mlp.down_proj"
    output, _ = quantize(source, format="pytorch", level="int4", group_size=16, keep=(kept,))
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert kept in ignored
    assert any(name.startswith("model.visual.") for name in ignored)
    after = load_file(output / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in after
    report = json.loads((output / "quantization.json").read_text())
    assert "images" in report["tensors"]["kept"]["visual.blocks.0.attn.qkv.weight"]
    compute(output, "AutoModelForImageTextToText")


def test_names_that_transformers_does_not_know_are_refused(quantize: Quantize, tmp_path: Path) -> None:
    source = make_kind("qwen2.5-vl", tmp_path / "kind").base
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.attention.wq.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelExportError, match=r"model\.layers\.0\.attention\.wq\.weight") as caught:
        quantize(source, format="pytorch", level="int4", group_size=16)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
