"""Models whose weights transformers renames while it loads them keep the names of their checkpoint, which serving tools know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE as PREPARE
from slipway_quantize.calibration.importance.stage import STAGE as IMPORTANCE
from slipway_quantize.calibration.params import CalibrateParams, ImportanceParams
from slipway_quantize.calibration.stage import STAGE as CALIBRATE
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
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
    if level == "fp8":  # it rounds the inputs too
        assert after[f"{module}.weight"].dtype == torch.float8_e4m3fn
        assert compute(output, auto_class).isfinite().all()
    else:
        dense, _ = quantize(source, format="pytorch", level=level, group_size=16, packed=False)
        assert load_file(dense / "model.safetensors").keys() == before.keys()
        found, wanted = compute(output, auto_class), compute(dense, auto_class)
        exact = compute(source, auto_class)
        assert (found - wanted).abs().max() < 0.02 * exact.std()
        assert (found - exact).abs().max() > 0


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_layers_that_keep_their_type_are_named_as_transformers_names_them(
    quantize: Quantize, tmp_path: Path, prefix: str
) -> None:
    source = make_kind("qwen2.5-vl", tmp_path / "kind").base
    kept = f"{prefix}layers.0.mlp.down_proj"
    output, ctx = quantize(source, format="pytorch", level="int4", group_size=16, keep=(kept,))
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.language_model.layers.0.mlp.down_proj" in ignored
    assert "warnings" not in ctx.facts
    assert any(name.startswith("model.visual.") for name in ignored)
    after = load_file(output / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in after
    report = json.loads((output / "quantization.json").read_text())
    assert "images" in report["tensors"]["kept"]["visual.blocks.0.attn.qkv.weight"]
    compute(output, "AutoModelForImageTextToText")


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3-vision", "mistral3"])
def test_layers_of_several_widths_are_read_back(quantize: Quantize, tmp_path: Path, name: str) -> None:
    source = make_kind(name, tmp_path / "kind").base
    budget = {"wide_share": 0.4} if name == "qwen2.5-vl" else {}
    output, _ = quantize(source, format="pytorch", level="int4", group_size=16, **budget)
    report = json.loads((output / "quantization.json").read_text())["tensors"]
    stored = load_file(source / "model.safetensors")
    assert {*report["quantized"]} - {"lm_head.weight"} <= stored.keys()
    if budget:
        assert {*report["bits"]} == {*report["quantized"]}
        assert {*report["bits"].values()} == {4, 8}
    (tmp_path / "read").mkdir()
    read = PREPARE.run({"base": output}, PrepareParams(), Context(workdir=tmp_path / "read"))["base"]
    found, wanted = compute(read, "AutoModelForImageTextToText"), compute(output, "AutoModelForImageTextToText")
    assert (found - wanted).abs().max() < 0.1 * wanted.std()  # read back in 16 bits


def test_importance_and_codes_have_a_place(quantize: Quantize, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp's types: pip install 'slipway-ml[gguf]'")
    from slipway_gguf.params import GGUFParams
    from slipway_gguf.stage import STAGE as GGUF

    source = make_kind("qwen2.5-vl", tmp_path / "kind").base
    (tmp_path / "data").mkdir()
    texts = ("the weights of the model are the weights of the file " * 20, "a file of the model and its weights " * 30)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts * 8)
    (tmp_path / "data" / "calibration.jsonl").write_text(lines)
    inputs = {"model": source, "data": tmp_path / "data"}
    small = {"windows": 8, "window_tokens": 16}

    def run(stage: Any, params: Any, given: dict[str, Path]) -> tuple[Path, Context]:
        workdir = tmp_path / stage.name
        workdir.mkdir()
        ctx = Context(workdir=workdir, threads=1)
        return next(iter(stage.run(given, params, ctx).values())), ctx

    importance, _ = run(IMPORTANCE, ImportanceParams(**small), inputs)
    _, ctx = run(GGUF, GGUFParams(type="q4_k_m"), {"pytorch": source, "importance": importance})
    assert ctx.facts["weighed_tensors"] == 15  # seven of each layer, and the head
    codes, _ = run(CALIBRATE, CalibrateParams(method="gptq", group_size=16, **small), inputs)
    output, _ = run(
        QUANTIZE, QuantizeParams(format="pytorch", level="int4", group_size=16), {"model": source, "calibration": codes}
    )
    methods = json.loads((output / "quantization.json").read_text())["tensors"]["methods"]
    assert methods["model.layers.0.self_attn.q_proj.weight"] == "gptq"
    compute(output, "AutoModelForImageTextToText")


def test_names_that_transformers_does_not_know_are_refused(quantize: Quantize, tmp_path: Path) -> None:
    source = make_kind("qwen2.5-vl", tmp_path / "kind").base
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.attention.wq.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelExportError, match=r"model\.layers\.0\.attention\.wq\.weight") as caught:
        quantize(source, format="pytorch", level="int4", group_size=16)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
