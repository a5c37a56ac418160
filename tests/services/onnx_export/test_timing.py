"""The report may say what the optimization of a graph gains in time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slipway_onnx_export.engines import ENGINES, Engine
from slipway_onnx_export.interface import EngineGraph, GraphRequest
from slipway_onnx_export.source import ModelSource
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, make_row

_LEGACY = {"engine": "legacy", "opset": 17}


@pytest.mark.parametrize(
    ("row", "params", "measured"),
    [
        ("Qwen3", {}, ["prefill_ms", "decode_ms"]),
        pytest.param("Marian, two vocabularies", _LEGACY, ["prefill_ms", "decode_ms"], marks=pytest.mark.slow),
        ("BERT, classes", _LEGACY, ["prefill_ms"]),
        pytest.param("Whisper", _LEGACY, ["prefill_ms", "decode_ms"], marks=pytest.mark.slow),
        pytest.param(
            "Qwen3", {"shapes": "static", "external_data": False}, ["prefill_ms", "decode_ms"], marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_times_before_and_after(
    tmp_path: Path, export: Callable[..., Exported], row: str, params: dict[str, Any], measured: list[str]
) -> None:
    source = make_row(next(each for each in ROWS if each.name == row), tmp_path / "model")
    exported = export(source, optimization_times=True, **params)
    assert "warnings" not in exported.facts or "static" in str(params)
    for side in ("before", "after"):
        times = {name: value for name, value in exported.facts["statistics"][side].items() if name.endswith("_ms")}
        assert times.keys() == set(measured)
        assert all(0 < value < 10_000 for value in times.values())
    recorded = json.loads((exported.folder / "onnx_export.json").read_text())["statistics"]
    assert recorded["after"].keys() == {"nodes", "size_bytes", "operators"}  # the folder is the same on every machine
    assert not list(exported.folder.glob("unoptimized_*"))


def test_a_slower_graph_has_the_larger_time(
    tmp_path: Path, export: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph before the optimization is one that was made without: here its engine adds a product that takes long."""
    source = make_row(next(each for each in ROWS if each.name == "BERT, classes"), tmp_path / "model")
    legacy = ENGINES["legacy"]

    class Slow(Engine):
        def build(self, source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
            graphs = legacy.build(source, request)
            if request.optimization == "none":
                _add_a_product(graphs[0].model.graph)
            return graphs

    slow = Slow(legacy.name, legacy.opsets, legacy.preferred, legacy.module)
    monkeypatch.setattr("slipway_onnx_export.export.choose_engine", lambda *_: slow)
    found = export(source, optimization_times=True, **_LEGACY).facts["statistics"]
    assert found["before"]["prefill_ms"] > 3 * found["after"]["prefill_ms"]


def _add_a_product(graph: ir.Graph) -> None:
    large = ir.tensor(np.full((1500, 1500), 1e-9, np.float32), name="large")
    value = ir.Value(name="large", shape=ir.Shape([1500, 1500]), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = large
    graph.register_initializer(value)
    one = ir.node("Cast", [graph.inputs[1]], {"to": 1})
    some = ir.node("ReduceMean", [one.outputs[0]], {"keepdims": 0})
    scaled = ir.node("Mul", [value, some.outputs[0]])
    product = ir.node("MatMul", [scaled.outputs[0], value])
    mean = ir.node("ReduceMean", [product.outputs[0]], {"keepdims": 0})
    result = graph.outputs[0]
    added = ir.node("Add", [result, mean.outputs[0]])
    graph.extend([one, some, scaled, product, mean, added])
    made = added.outputs[0]
    made.name, result.name = result.name, "result_before"
    made.type, made.shape = result.type, result.shape
    graph.outputs[0] = made


def test_what_is_not_optimized_is_not_timed(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    exported = export(family("gpt2"), optimization_times=True, optimization="none", **_LEGACY)
    assert exported.facts["warnings"] == ["the optimization of the ONNX graph was not timed: graphs are not optimized"]
    assert "prefill_ms" not in exported.facts["statistics"]["after"]
