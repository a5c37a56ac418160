"""The constants of a graph that are weights are found in every form exporters write, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from slipway.stage import Context
from slipway_quantize.graphs.weights import find_weights
from support.models.quantize_models import onnx_session

Quantize = Callable[..., tuple[Path, Context]]
WIDTH, TOKENS = 32, 48


def constant(name: str, *shape: int) -> onnx.TensorProto:
    seed = sum(name.encode())
    return onnx.numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), name)


def save(folder: Path, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]) -> Path:
    """A graph from input_ids (tokens) to logits (tokens, TOKENS)."""
    folder.mkdir()
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["tokens", None])],
        constants,
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    (folder / "config.json").write_text("{}")
    return folder


def logits(folder: Path) -> np.ndarray:
    return onnx_session(folder).run(None, {"input_ids": np.arange(TOKENS)})[0]


TABLE = constant("table", TOKENS, WIDTH)
LOOKUP = helper.make_node("Gather", ["table", "input_ids"], ["x"])
GRAPHS = {
    "gemm with bias": (
        [LOOKUP, helper.make_node("Gemm", ["x", "w", "b"], ["logits"], transB=1)],
        [TABLE, constant("w", TOKENS, WIDTH), constant("b", TOKENS)],
        {"table", "w"},
    ),
    "gemm stored input first": (
        [LOOKUP, helper.make_node("Gemm", ["x", "w"], ["logits"])],
        [TABLE, constant("w", WIDTH, TOKENS)],
        {"table", "w"},
    ),
    "tied through a transpose": (
        [
            LOOKUP,
            helper.make_node("Transpose", ["table"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "t"], ["logits"]),
        ],
        [TABLE],
        {"table"},
    ),
    "scaled gemm is left alone": (
        [LOOKUP, helper.make_node("Gemm", ["x", "w"], ["logits"], alpha=0.5)],
        [TABLE, constant("w", WIDTH, TOKENS)],
        {"table"},
    ),
    "matrix with another use is left alone": (
        [
            LOOKUP,
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("ReduceMax", ["w"], ["largest"], keepdims=0),
            helper.make_node("Div", ["y", "largest"], ["logits"]),
        ],
        [TABLE, constant("w", WIDTH, TOKENS)],
        {"table"},
    ),
    "table looked up by something else is left alone": (
        [
            LOOKUP,
            helper.make_node("Abs", ["input_ids"], ["positions"]),
            helper.make_node("Gather", ["angles", "positions"], ["a"]),
            helper.make_node("Add", ["x", "a"], ["z"]),
            helper.make_node("MatMul", ["z", "w"], ["logits"]),
        ],
        [TABLE, constant("angles", TOKENS, WIDTH), constant("w", WIDTH, TOKENS)],
        {"table", "w"},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_are_found_and_replaced_exactly(quantize: Quantize, tmp_path: Path, name: str) -> None:
    nodes, constants, expected = GRAPHS[name]
    source = save(tmp_path / "source", nodes, constants)
    assert {weight.name for weight in find_weights(ir.load(source / "model.onnx").graph)} == expected
    packed, _ = quantize(source, format="onnx", level="int8", accuracy_level=1, check=False)
    dense, _ = quantize(source, format="onnx", level="int8", packed=False, check=False)
    np.testing.assert_allclose(logits(packed), logits(dense), atol=1e-5)
    exact = logits(source)
    assert 0 < np.abs(logits(packed) - exact).max() < 0.03 * np.abs(exact).max()
    left = {t.name for t in onnx.load(packed / "model.onnx", load_external_data=False).graph.initializer}
    assert not left & expected


@pytest.mark.parametrize("name", GRAPHS)
def test_fp16_of_the_same_graphs(quantize: Quantize, tmp_path: Path, name: str) -> None:
    nodes, constants, _ = GRAPHS[name]
    source = save(tmp_path / "source", nodes, constants)
    half, _ = quantize(source, format="onnx", level="fp16", check=False)
    assert logits(half).dtype == np.float16
    np.testing.assert_allclose(logits(half), logits(source), atol=5e-2)
