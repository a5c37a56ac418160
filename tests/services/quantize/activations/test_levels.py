"""Integers for activations: what the graphs compute, how runtimes fuse them, and what cannot be made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.torch import load_file

from slipway.errors import ModelExportError
from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from slipway_validate.runner.survival.graphs import Graphs
from support.models.quantize_models import divergence, onnx_logits, onnx_session, onnx_step

from .conftest import Trained

Quantize = Callable[..., tuple[Path, Context]]
AtLevel = Callable[[str], tuple[Path, Context]]
STATIC = {"format": "onnx", "level": "int8_static"}
TOKENS = np.random.default_rng(3).integers(3, 1000, (4, 48))


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def fused(folder: Path, target: Path) -> Counter[str]:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return operators(target)


@pytest.mark.parametrize("level", ["int8_dynamic", "int8_static"])
def test_the_result_computes_what_the_model_does(
    at_level: AtLevel, trained: Trained, level: str, tmp_path: Path
) -> None:
    result, ctx = at_level(level)
    kl, agreement = divergence(onnx_logits(trained.graph, TOKENS), onnx_logits(result, TOKENS))
    assert 1e-7 < kl < 2e-3
    assert agreement > 0.95
    assert ctx.facts["check"] == "passed"
    assert ctx.facts["reduction"] > 0.65
    assert not fused(result, tmp_path / "fused.onnx").keys() & {"MatMul", "MatMulInteger"}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["int8_dynamic", "int8_static"])
def test_the_cache_of_keys_and_values_is_used(at_level: AtLevel, level: str) -> None:
    session = onnx_session(at_level(level)[0])
    whole, _ = onnx_step(session, TOKENS[:1])
    _, past = onnx_step(session, TOKENS[:1, :40])
    after, _ = onnx_step(session, TOKENS[:1, 40:], past)
    kl, _ = divergence(whole[:, 40:], after)
    assert kl < 1e-3


@pytest.mark.slow
def test_runtimes_fuse_every_pair(at_level: AtLevel, tmp_path: Path) -> None:
    result, ctx = at_level("int8_static")
    made = operators(result / "model.onnx")
    products = (
        ctx.facts["tensors_quantized"] - 1 - 2 - 1
    )  # the table is a product too; q, k and v are one, and gate and up
    assert made["QuantizeLinear"] == made["MatMul"] == products + 1
    assert made["DequantizeLinear"] == 2 * made["MatMul"]
    found = fused(result, tmp_path / "fused.onnx")
    assert (found["MatMulIntegerToFloat"], found["DequantizeLinear"]) == (made["MatMul"], 0)
    # TensorRT takes no zero points other than 0.
    zeros = [each for each in ir.load(result / "model.onnx").graph.initializers.values() if "zero" in str(each.name)]
    assert len(zeros) == 2 * made["MatMul"]
    assert all(not each.const_value.numpy().any() for each in zeros)


@pytest.mark.slow
def test_what_was_measured_is_recorded(at_level: AtLevel) -> None:
    result, _ = at_level("int8_static")
    noted = json.loads((result / "quantization.json").read_text())
    activations = noted["activations"]
    assert set(activations["divergence"]) == {"minmax", "entropy", "percentile"}
    assert activations["method"] == min(activations["divergence"], key=activations["divergence"].get)
    assert 0 < noted["divergence"] < 1e-3
    assert activations["windows"] > activations["held_out_windows"] > 0


@pytest.mark.slow
def test_the_same_text_gives_the_same_bits(at_level: AtLevel, quantize: Quantize, trained: Trained) -> None:
    first, _ = at_level("int8_static")  # by one thread
    second, _ = quantize(trained.graph, trained.data, threads=2, **STATIC)
    for name in ("model.onnx", "model.onnx.data", "quantization.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_each_window_that_ranges_are_tried_on_is_told(trained: Trained, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    ctx = Context(workdir=tmp_path, threads=1, on_progress=lambda it: told.append((it.phase, it.done, it.total)))
    STAGE.run({"model": trained.graph, "data": trained.data}, QuantizeParams(**STATIC), ctx)
    windows = ctx.facts["activations"]["held_out_windows"]
    assert windows > 1
    assert [each for each in told if each[0] == "compare"][:windows] == [
        ("compare", n, windows) for n in range(windows)
    ]


def test_products_that_cannot_be_rounded_keep_their_type(quantize: Quantize, trained: Trained) -> None:
    result, ctx = quantize(trained.scaled_graph, trained.data, **STATIC, smoothing=0.0)
    noted = json.loads((result / "quantization.json").read_text())
    steps = noted["activations"]["divergence_by_kept"]
    [kept] = noted["tensors"]["kept"]
    assert kept == "model.layers.0.mlp.down_proj.weight.T"
    assert "lowers the divergence on held-out text" in noted["tensors"]["kept"][kept]
    assert noted["divergence"] < 1e-3 < steps["0"]
    assert ctx.facts["tensors_kept"] == 1


@pytest.mark.slow
def test_smoothing_rounds_them_all(quantize: Quantize, trained: Trained) -> None:
    result, ctx = quantize(trained.scaled_graph, trained.data, **STATIC)
    assert ctx.facts["tensors_kept"] == 0
    assert json.loads((result / "quantization.json").read_text())["divergence"] < 1e-3


@pytest.mark.slow
def test_layers_that_the_settings_keep_stay(quantize: Quantize, trained: Trained) -> None:
    for level in ("int8_dynamic", "int8_static"):
        result, _ = quantize(
            trained.graph, trained.data, format="onnx", level=level, keep=("q_proj", "layers.0.mlp.down_proj")
        )
        kept = json.loads((result / "quantization.json").read_text())["tensors"]["kept"]
        assert sorted(kept) == ["model.layers.0.mlp.down_proj.weight.T", "model.layers.0.self_attn.q_proj.weight.T"]
        assert set(kept.values()) == {"asked for by keep"}
        assert divergence(onnx_logits(trained.graph, TOKENS), onnx_logits(result, TOKENS))[0] < 2e-3


def test_without_text_there_are_no_ranges(quantize: Quantize, trained: Trained) -> None:
    with pytest.raises(ModelExportError, match="int8_static needs text") as caught:
        quantize(trained.graph, **STATIC)
    assert caught.value.reason == "CALIBRATION_DATA_INVALID"
    assert "int8_dynamic" in caught.value.remedy


def test_an_old_opset_is_refused(quantize: Quantize, trained: Trained, tmp_path: Path) -> None:
    for path in trained.graph.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    model.opset_import[0].version = 12
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelExportError, match="opset 12") as caught:
        quantize(tmp_path, trained.data, format="onnx", level="int8_dynamic")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_families_without_plain_text_are_refused_before() -> None:
    translator = {"architectures": ["MarianMTModel"], "model_type": "marian"}
    assert "use int8_dynamic" in STAGE.forecast.refuses(
        QuantizeParams(format="onnx", level="int8_static"), ModelConfig(translator)
    )
    assert not STAGE.forecast.refuses(QuantizeParams(format="onnx", level="int8_dynamic"), ModelConfig(translator))
    decoder = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert not STAGE.forecast.refuses(QuantizeParams(format="onnx", level="int8_static"), ModelConfig(decoder))
    assert "dense" in STAGE.forecast.refuses(
        QuantizeParams(format="onnx", level="int8_static", packed=False), ModelConfig(decoder)
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", ["int8_dynamic", "int8_static"])
def test_validation_reads_the_stored_weights(at_level: AtLevel, trained: Trained, level: str) -> None:
    result, _ = at_level(level)
    weights = load_file(trained.model / "model.safetensors")
    stored = Graphs(result, lambda name: len(weights[name]))
    for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        exact = weights[f"model.layers.0.{name}.weight"]
        found = stored.weight(f"model.layers.0.{name}.weight", turned=False).take(slice(None))
        assert (
            float((found.values - exact).norm() / exact.norm()) < 0.03
        )  # features that smoothing makes small lose more
        assert found.changed_from(exact) < 0.001 * exact.numel()  # a tie that rounds the other way
        assert found.changed_from(exact * 1.1) > 0.5 * exact.numel()


@pytest.mark.slow
def test_weights_that_are_left_out_give_the_same_bits(
    at_level: AtLevel, quantize: Quantize, trained: Trained, tmp_path: Path
) -> None:
    params = OnnxExportParams(parity="never", weights="deferred")
    deferred = EXPORT.run({"pytorch": trained.model}, params, Context(workdir=tmp_path))["onnx"]
    assert not (deferred / "model.onnx.data").exists() or (deferred / "model.onnx.data").stat().st_size < 1 << 20
    for level in ("int8_static", "fp16"):
        whole, _ = at_level(level)
        made, ctx = quantize(deferred, trained.data, pytorch=trained.model, format="onnx", level=level)
        assert (made / "model.onnx.data").read_bytes() == (whole / "model.onnx.data").read_bytes(), level
        assert ctx.facts["size_before_bytes"] > 2 * ctx.facts["size_after_bytes"] * 0.99
        assert [path.name for path in ctx.workdir.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_graph_of_which_all_is_kept_needs_no_ranges(quantize: Quantize, trained: Trained) -> None:
    keep = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
    result, ctx = quantize(trained.graph, trained.data, **STATIC, keep=keep)
    assert ctx.facts["tensors_quantized"] == 0
    np.testing.assert_allclose(onnx_logits(result, TOKENS), onnx_logits(trained.graph, TOKENS), atol=1e-4)


@pytest.mark.parametrize("opset", [17, 23])
def test_a_text_gives_the_same_results_alone_and_padded(quantize: Quantize, opset: int, tmp_path: Path) -> None:
    """One range for a whole batch would coarsen a short text by what its padding and its neighbours compute."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(32, 24)).astype(np.float32)
    folder = product_of(tmp_path / "source", weight, opset=opset)
    result, _ = quantize(folder, format="onnx", level="int8_dynamic", check=False)
    session = ort.InferenceSession(result / "model.onnx", providers=["CPUExecutionProvider"])
    short, long = rng.normal(size=(1, 5, 32)).astype(np.float32), 300 * rng.normal(size=(1, 9, 32)).astype(np.float32)
    (alone,) = session.run(None, {"x": short})
    padded = np.concatenate([np.pad(short, ((0, 0), (0, 4), (0, 0)), constant_values=500.0), long])
    (together,) = session.run(None, {"x": padded})
    assert np.array_equal(alone[0], together[0, :5])
    assert np.abs(alone - short @ weight).max() < 0.3
    assert not np.isnan(session.run(None, {"x": np.zeros_like(short)})[0]).any()


def product_of(folder: Path, weight: np.ndarray, *, opset: int) -> Path:
    """Write a graph that multiplies its input (B, T, K) by a weight (K, N)."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    float32 = onnx.TensorProto.FLOAT
    given, result = (
        onnx.helper.make_tensor_value_info(name, float32, ["b", "t", size])
        for name, size in zip("xy", weight.shape, strict=True)
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [given],
        [result],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder
