"""One graph of the base serves every fine-tune: with an adapter it is the merged model, without it the base."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers as tf
from peft import PeftModel

from slipway.errors import AdapterExportError, ModelExportError
from slipway.proof.runtime import plain_step
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_validate.runner.onnx_graphs.load import load
from support.models.judged_families import make
from support.models.merge_cases import TOKENS

ROW = TOKENS[:1]


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, bases: Callable[[str], Path]) -> Callable[[str], Path]:
    """The exports of bases, each made once."""
    made: dict[str, Path] = {}

    def graph(kind: str) -> Path:
        if kind not in made:
            ctx = Context(workdir=tmp_path_factory.mktemp(kind), log=logging.getLogger("test"))
            made[kind] = EXPORT.run({"pytorch": bases(kind)}, OnnxExportParams(parity="never"), ctx)["onnx"]
        return made[kind]

    return graph


def of_graph(folder: Path) -> Any:
    """Return logits of the tokens, computed in two calls through the cache."""
    model, tokens = load(folder, threads=1), ROW[0].tolist()
    first, past = model.forward(plain_step(tokens[:7], past=None, past_length=0))
    second, _ = model.forward(plain_step(tokens[7:], past=past, past_length=7))
    return np.concatenate([first, second], axis=1)


@torch.no_grad()
def of_torch(base: Path, adapter: Path | None = None) -> Any:
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(ROW).logits.numpy()


def difference(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"up_proj": 6}, "alpha_pattern": {"layers.0.*": 3}, "use_rslora": True},
        {"target_modules": ["lm_head", "down_proj"]},
    ],
    ids=["patterns", "head"],
)
def test_the_graph_with_the_adapter_is_the_trained_model(tune, deliver, bases, graphs, options) -> None:
    base, graph, adapter = bases("qwen3"), graphs("qwen3"), tune(**options)
    folder, ctx = deliver(base, adapter, onnx=graph, target="onnx")
    trained = of_torch(base, adapter)
    assert difference(of_torch(base), trained) > 1e-2
    assert difference(of_graph(folder), trained) < 1e-5
    (folder / "model.onnx_adapter").unlink()
    assert np.array_equal(of_graph(folder), of_graph(graph))
    assert ctx.facts["modules"] > 0


def test_fine_tunes_of_one_base_share_its_graph(tune, deliver, bases, graphs, tmp_path) -> None:
    first = tune(name="first")
    second = tune(name="second", r=3, target_modules=["v_proj", "down_proj"], layers_to_transform=[1], seed=8)
    folders = [
        deliver(bases("qwen3"), adapter, onnx=graphs("qwen3"), target="onnx", name=name)[0]
        for name, adapter in (("one", first), ("two", second))
    ]
    written = [(folder / "model.onnx").read_bytes() for folder in folders]
    assert written[0] == written[1]
    onnx.checker.check_model(folders[0] / "model.onnx")
    shutil.copy(folders[1] / "model.onnx_adapter", folders[0])
    assert difference(of_graph(folders[0]), of_torch(bases("qwen3"), second)) < 1e-5
    assert difference(of_graph(folders[0]), of_torch(bases("qwen3"), first)) > 1e-2


@pytest.mark.slow
def test_each_graph_of_an_encoder_decoder_has_the_factors_of_its_own_layers(deliver, tmp_path) -> None:
    """Layers of the two have names with the same end."""
    model = make("marian", tmp_path / "marian")
    assert model.adapter is not None
    ctx = Context(workdir=tmp_path / "export", log=logging.getLogger("test"))
    ctx.workdir.mkdir()
    graph = EXPORT.run({"pytorch": model.base}, OnnxExportParams(parity="never"), ctx)["onnx"]
    folder, ctx = deliver(model.base, model.adapter, onnx=graph, target="onnx")
    stored = {
        part: set(ort.AdapterFormat.read_adapter(str(folder / f"{part}_model.onnx_adapter")).get_parameters())
        for part in ("encoder", "decoder")
    }
    own = {part: {name for name in names if f"model.{part}.layers" in name} for part, names in stored.items()}
    assert all("encoder_attn.v_proj" in name for name in stored["encoder"] - own["encoder"])
    assert own["decoder"] == stored["decoder"]
    assert len(own["encoder"]) == 2 * 2 * len(("q_proj", "v_proj", "fc1"))
    assert len(stored["encoder"] | stored["decoder"]) == 2 * ctx.facts["modules"]
    base = tf.AutoModelForSeq2SeqLM.from_pretrained(model.base)
    with torch.no_grad():
        plain = base.get_encoder()(ROW).last_hidden_state.numpy()
        trained = PeftModel.from_pretrained(base, model.adapter).eval().get_encoder()(ROW).last_hidden_state.numpy()
    adapter = ort.LoraAdapter()
    adapter.Load(str(folder / "encoder_model.onnx_adapter"))
    options, feed = ort.RunOptions(), {"input_ids": ROW.numpy(), "attention_mask": np.ones_like(ROW.numpy())}
    options.add_active_adapter(adapter)
    [found] = ort.InferenceSession(folder / "encoder_model.onnx").run(["last_hidden_state"], feed, options)
    assert difference(plain, trained) > 1e-2
    assert difference(found, trained) < 1e-5


def test_what_the_graph_does_not_take_is_refused(tune, deliver, bases, graphs, tmp_path) -> None:
    with pytest.raises(AdapterExportError) as caught:
        deliver(bases("qwen3"), tune(target_modules=["embed_tokens"]), onnx=graphs("qwen3"), target="onnx", name="a")
    assert caught.value.about["rule"] == "lookup"
    with pytest.raises(ModelExportError) as missing:
        deliver(bases("qwen3"), tune(), target="onnx", name="b")
    assert missing.value.reason == "INPUT_MISSING"
    broken = tmp_path / "broken"
    shutil.copytree(graphs("qwen3"), broken)
    model = onnx.load(broken / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        node.input[:] = [name.replace("layers.1.mlp.up_proj.weight.T", "strange") for name in node.input]
    for constant in model.graph.initializer:
        constant.name = constant.name.replace("layers.1.mlp.up_proj.weight.T", "strange")
    onnx.save(model, broken / "model.onnx")
    with pytest.raises(AdapterExportError, match=r"no product with the weight of 'model.layers.1.mlp.up_proj'"):
        deliver(bases("qwen3"), tune(), onnx=broken, target="onnx", name="c")
    (broken / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(AdapterExportError) as unreadable:
        deliver(bases("qwen3"), tune(), onnx=broken, target="onnx", name="d")
    assert unreadable.value.reason == "ONNX_INVALID"
