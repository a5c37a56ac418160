"""Every level: what the quantize stage writes for TensorRT, how exact it is, and engines really built from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipway.configuration.loading import parse
from slipway.errors import ConfigurationError, ModelExportError, TensorRTBuildError
from slipway.planning.plan import plan
from slipway.stage import Context
from slipway_quantize.graphs.precision import widen
from slipway_tensorrt_build.params import LEVELS
from support.models.engine_plans import weights_of
from support.models.onnx_models import save_model
from support.models.quantize_models import divergence

from .conftest import assert_every_weight_is_known, exported

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is made for x86-64 Linux and Windows")

Quantize = Callable[..., tuple[Path, Context]]
Build = Callable[..., tuple[Path, Context]]
CODES = {"int8_static": ir.DataType.INT8, "fp8_static": ir.DataType.FLOAT8E4M3FN}
SLOW = pytest.mark.slow
TOKENS = np.random.default_rng(3).integers(3, 48, (2, 24))


def needs_text(level: str) -> bool:
    return level in CODES


def logits(folder: Path) -> np.ndarray:
    """The graph's results for two rows with an empty cache, computed by ONNX Runtime; bf16 is computed in float32 and rounded."""
    model = ir.load(folder / "model.onnx")
    widen(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    feeds = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS), "token_type_ids": np.zeros_like(TOKENS)}
    feeds["position_ids"] = np.tile(np.arange(TOKENS.shape[1]), (2, 1))
    for value in session.get_inputs():
        if value.name.startswith("past"):
            kind = np.float16 if "float16" in value.type else np.float32
            feeds[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), kind)
    taken = {value.name for value in session.get_inputs()}
    [found] = session.run(["logits"], {name: value for name, value in feeds.items() if name in taken})
    return found.astype(np.float32)


@pytest.mark.parametrize(
    ("name", "level"),
    [pytest.param("classifier", level, marks=() if level == "bf16" else SLOW) for level in LEVELS]
    + [
        pytest.param("decoder", "bf16", marks=SLOW),
        pytest.param("traced decoder", "fp8_static", marks=SLOW),
    ],
)
def test_an_engine_of_each_level(
    graphs: dict[str, Path], text: Path, quantize: Quantize, build: Build, name: str, level: str
) -> None:
    """A decoder's engines of the other levels are built below. A traced decoder's weights have the graph's names, as a refit needs them."""
    graph, ctx = quantize(graphs[name], text if needs_text(level) else None, level=level)
    exact, found = logits(graphs[name]), logits(graph)
    assert np.abs(exact - found).max() > 1e-5
    assert divergence(exact, found)[0] < (2e-3 if needs_text(level) else 2e-4)
    assert ctx.facts["check"] == "passed"
    folder, ctx = build(graph, targets=("sm89", "sm120"))
    described = json.loads((folder / "engine.json").read_text())
    assert described["precision"] == ctx.facts["precision"] == level
    assert [engine["target"] for engine in described["engines"]] == ["sm89", "sm120"]
    values = {value["name"]: value["dtype"] for value in (*described["inputs"], *described["outputs"])}
    assert values["logits"] == {"fp16": "half", "bf16": "bf16"}.get(level, "float")
    if name == "traced decoder":
        assert_every_weight_is_known(graphs[name])
    if "decoder" in name:
        assert values["past_key_values.0.key"] == values["present.1.value"] == values["logits"]
    else:
        [profile] = described["profiles"]
        assert profile["attention_mask"] == profile["input_ids"] == {"min": [1, 1], "opt": [1, 64], "max": [4, 64]}


@SLOW
@pytest.mark.parametrize(
    ("name", "engine"),
    [("gemma3-window", "dynamo"), ("gpt2", "legacy")],
)
def test_traced_decoders_build_in_fp16(
    tmp_path: Path, quantize: Quantize, build: Build, name: str, engine: str
) -> None:
    """TensorRT-RTX's fusion of attention refuses the guard that torch writes against fully masked rows."""
    graph = exported(save_model(name, tmp_path / name), tmp_path / "graph", engine=engine, parity="always")
    assert "IsNaN" not in {node.op_type for node in ir.load(graph / "model.onnx").graph}
    folder, ctx = build(quantize(graph, level="fp16")[0], targets=("sm75", "sm89", "sm120"))
    assert ctx.facts["precision"] == "fp16"
    assert len(list(folder.glob("*.engine"))) == 3


@pytest.mark.parametrize(("name", "level"), [("decoder", "int8_static"), ("classifier", "fp8_static")])
def test_codes_of_weights_go_into_dequantize_linear_alone(
    graphs: dict[str, Path], text: Path, quantize: Quantize, name: str, level: str
) -> None:
    """TensorRT refuses any other use; the table of tokens stays as it is, also where the head is the same table."""
    folder, _ = quantize(graphs[name], text, level=level)
    model = ir.load(folder / "model.onnx")
    codes = [value for value in model.graph.initializers.values() if value.dtype is CODES[level]]
    assert len(codes) > 8
    readers = {(user.op_type, index) for value in codes for user, index in value.uses() if len(value.shape) == 2}
    assert readers == {("DequantizeLinear", 0)}
    assert all(not np.any(value.const_value.numpy().astype(np.float32)) for value in codes if len(value.shape) < 2)
    lookups = [node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"]
    assert [node.inputs[0].dtype for node in lookups] == [ir.DataType.FLOAT]
    noted = json.loads((folder / "quantization.json").read_text())
    assert noted["divergence"] < 2e-3
    assert noted["activations"]["method"] in (
        ["minmax"] if level == "fp8_static" else noted["activations"]["divergence"]
    )
    if name == "classifier":
        assert "looked up" in noted["tensors"]["kept"]["bert.embeddings.word_embeddings.weight"]


@SLOW
def test_weights_in_an_engine_have_their_level_s_size(
    tmp_path: Path, text: Path, quantize: Quantize, build: Build
) -> None:
    from support.models.quantize_models import save_tiny
    from support.models.tiny_models import save_tokenizer

    source = save_tiny(tmp_path / "wide", hidden_size=256, intermediate_size=1024, tied=False)
    save_tokenizer(source)
    graph = exported(source, tmp_path / "graph")
    sizes = {}
    for level in ("", *LEVELS):
        made = quantize(graph, text if needs_text(level) else None, level=level)[0] if level else graph
        folder, _ = build(made, targets=("sm89",))
        sizes[level] = len(weights_of((folder / "model.sm89.engine").read_bytes()))
        described = json.loads((folder / "engine.json").read_text())
        values = {value["name"]: value["dtype"] for value in (*described["inputs"], *described["outputs"])}
        kind = {"fp16": "half", "bf16": "bf16"}.get(level, "float")
        assert values["past_key_values.0.key"] == values["present.1.value"] == values["logits"] == kind
    assert sizes["fp16"] == pytest.approx(sizes[""] / 2, rel=0.05)
    assert sizes["bf16"] == pytest.approx(sizes[""] / 2, rel=0.05)
    # The table of tokens stays float32: 512 of the 10,000 rows or so.
    assert sizes["int8_static"] < 0.36 * sizes[""]
    assert sizes["fp8_static"] < 0.36 * sizes[""]


@pytest.mark.parametrize(("level", "target", "first"), [("bf16", "sm75", "sm80"), ("fp8_static", "sm86", "sm89")])
def test_a_gpu_without_the_type_is_refused_by_name(
    graphs: dict[str, Path], text: Path, quantize: Quantize, build: Build, level: str, target: str, first: str
) -> None:
    graph, _ = quantize(graphs["classifier"], text if needs_text(level) else None, level=level)
    with pytest.raises(TensorRTBuildError, match=f"{target} does not compute.*{first}") as caught:
        build(graph, targets=(target, first))
    assert caught.value.reason == "TENSORRT_TARGET_UNSUPPORTED"
    assert caught.value.about == {"level": level, "targets": target}
    section = {"enabled": True, "quantization": [level], "targets": [target, first]}
    with pytest.raises(ConfigurationError, match=f"{target} does not compute in the type of {level}"):
        parse({"formats": {"tensorrt": section}})


def test_a_graph_at_a_level_of_another_format_is_refused(
    graphs: dict[str, Path], quantize: Quantize, build: Build
) -> None:
    graph, _ = quantize(graphs["decoder"], format="onnx", level="int8")
    with pytest.raises(TensorRTBuildError, match="not made for TensorRT") as caught:
        build(graph, targets=("sm89",))
    assert caught.value.reason == "ONNX_INVALID"


def test_fp8_needs_text_and_says_so(graphs: dict[str, Path], quantize: Quantize) -> None:
    with pytest.raises(ModelExportError, match="fp8_static needs text") as caught:
        quantize(graphs["decoder"], level="fp8_static")
    assert caught.value.reason == "CALIBRATION_DATA_INVALID"
    assert "bf16" in caught.value.remedy


def tasks(**section: object) -> dict[str, object]:
    data = {"optimization": {"quantization": "int8"}, "formats": {"tensorrt": {"enabled": True, **section}}}
    return {task.id: task for task in plan(parse(data), ("base", "adapter"))}


def test_each_level_has_a_graph_and_an_engine_of_its_own() -> None:
    planned = tasks(quantization=["fp16", "int8_static"], targets=["sm89"])
    for level in ("fp16", "int8_static"):
        rounded, engine = planned[f"quantize-tensorrt-{level}"], planned[f"tensorrt_build-{level}"]
        assert (rounded.format, rounded.inputs["model"]) == ("", "task:onnx_export-tensorrt/onnx")
        assert (engine.format, engine.inputs) == (
            f"tensorrt-{level}",
            {"onnx": f"task:quantize-tensorrt-{level}/model"},
        )
    assert planned["quantize-tensorrt-int8_static"].inputs["data"] == "task:calibration_data/data"
    assert "data" not in planned["quantize-tensorrt-fp16"].inputs or planned["calibration_data"]
    assert planned["tensorrt_build"].format == "tensorrt"


def test_common_levels_make_no_engines_and_the_plain_engine_can_be_left_out() -> None:
    """An engine takes minutes; and a level like int8 means something else here."""
    assert not [name for name in tasks() if "tensorrt-" in name and "quantize" in name]
    assert "tensorrt_build" not in tasks(unquantized=False, quantization=["fp16"])
    with pytest.raises(ConfigurationError, match=r"int8 is not delivered as tensorrt.*int8_static"):
        tasks(quantization=["int8"])
