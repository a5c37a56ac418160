"""Processors that add products of integers in 16 bits: the codes leave room for two of them.

valgrind shows programs a processor without AVX-512 and VNNI, so ONNX Runtime takes the kernels of such a processor there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.stage import Context

Quantize = Callable[..., tuple[Path, Context]]
FEATURES = 63, 32
"""Input features and output features."""
RUN = """
import sys
import numpy as np
import onnxruntime
given, target, *models = sys.argv[1:]
graphs = [onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]) for model in models]
np.save(target, [graph.run(None, {"x": np.load(given)})[0] for graph in graphs])
"""
VALGRIND = shutil.which("valgrind")


def write_product(folder: Path, weight: Any, *, turned: bool) -> Path:
    """Write a graph that multiplies ``x`` by a weight (in, out), which is stored (out, in) if ``turned``."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    nodes = [helper.make_node("Relu", ["x"], ["positive"])]
    nodes += [helper.make_node("Transpose", ["w"], ["matrix"], perm=[1, 0])] if turned else []
    nodes += [helper.make_node("MatMul", ["positive", "matrix" if turned else "w"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", len(weight)])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", weight.shape[1]])
    table = numpy_helper.from_array(np.ascontiguousarray(weight.T if turned else weight), "w")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [table]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(VALGRIND is None, reason="valgrind is not installed")
def test_products_do_not_saturate(quantize: Quantize, tmp_path: Path) -> None:
    """The largest weights side by side and the largest activations: the sum of two products does not fit without room for it."""
    chance = np.random.default_rng(1)
    weight = chance.uniform(0.7, 1, FEATURES).astype(np.float32)
    weight[:, ::2] *= -1
    values = chance.uniform(0.8, 1, (4, FEATURES[0])).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    graphs = []
    for turned in (False, True):
        source = write_product(tmp_path / f"source-{turned}", weight, turned=turned)
        graph, _ = quantize(source, format="onnx", level="int8_dynamic", check=False)
        graphs.append(str(graph / "model.onnx"))
    script, given = [sys.executable, "-c", RUN], str(tmp_path / "x.npy")
    here, old = tmp_path / "here.npy", tmp_path / "old.npy"
    subprocess.run([*script, given, str(here), *graphs], check=True)
    subprocess.run([str(VALGRIND), "--tool=none", "--quiet", *script, given, str(old), *graphs], check=True)
    exact = values @ weight
    for found in (*np.load(here), *np.load(old)):
        assert found.shape == exact.shape
        assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("level", ["int8_dynamic", "int8_static"])
def test_two_codes_side_by_side_fit(at_level: Callable[[str], tuple[Path, Context]], level: str) -> None:
    result, _ = at_level(level)
    model = onnx.load(result / "model.onnx")
    turned = {node.input[0] for node in model.graph.node if node.op_type == "Transpose"}
    seen = 0
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.INT8 or len(tensor.dims) != 2:
            continue
        codes = numpy_helper.to_array(tensor)
        by_feature = codes if tensor.name in turned else codes.T  # (N, K)
        pairs = by_feature[:, : by_feature.shape[1] // 2 * 2].reshape(len(by_feature), -1, 2).astype(int)
        assert np.abs(pairs.sum(axis=2)).max() <= 128
        assert np.abs(codes).max() > 63
        seen += 1
    assert seen
