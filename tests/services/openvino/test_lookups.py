"""Rows looked up in integers, and products with them, stay integers in the plugin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

pytest.importorskip("slipway_openvino.library", reason="openvino is not installed", exc_type=ImportError)

from slipway_openvino.graphs.lookups import readable_graph
from slipway_openvino.graphs.passes import sign_integers
from slipway_openvino.library import ov
from support.models.openvino_models import held_types, save_graph, tied_graph


@pytest.mark.parametrize("groups", [4, 3], ids=["even", "odd"])
@pytest.mark.parametrize("zeros", [False, True], ids=["signed", "zero_points"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_kept_by_the_plugin(bits: int, zeros: bool, groups: int, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    weights = tied_graph(tmp_path / "model.onnx", bits=bits, groups=groups, zeros=zeros)
    model = ov.Core().read_model(readable_graph(tmp_path / "model.onnx", tmp_path / "work"))
    memory = sign_integers(model, tmp_path / "work")
    assert (memory is None) == zeros
    ov.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    held = held_types(tmp_path / "model.xml")
    kind = f"{'u' if zeros else 'i'}{bits}"
    assert held["FullyConnected"] == {kind}
    # whole rows of an odd number of zero points in 4 bits cannot be compiled
    assert held["Gather"] == ({"f32"} if bits == 4 and zeros and groups % 2 else {kind})
    ids = np.array([[1, 5, 63], [0, 7, 7]])
    exact = ov.Core().compile_model(
        model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    )
    wanted = weights[ids] @ weights.T
    assert abs(exact(ids)[0] - wanted).max() < 1e-4 * abs(wanted).max()


def test_scales_of_two_lookups_keep_the_shapes_of_both(tmp_path: Path) -> None:
    """They share what is stored, and are reshaped to different targets."""
    (tmp_path / "work").mkdir()
    shapes = {"rows": [4, 2], "columns": [2, 4]}
    stored = {"scales": np.ones(8, np.float32)}
    nodes = []
    for name, (rows, groups) in shapes.items():
        stored |= {f"{name}.shape": np.array([rows, groups]), f"{name}.data": np.zeros((rows, groups * 16), np.uint8)}
        nodes.append(helper.make_node("Reshape", ["scales", f"{name}.shape"], [f"{name}.reshaped"]))
        read = [f"{name}.data", "ids", f"{name}.reshaped"]
        nodes.append(helper.make_node("GatherBlockQuantized", read, [name], domain="com.microsoft"))
    save_graph(tmp_path / "model.onnx", nodes, [1], list(shapes), stored)
    written = onnx.load(readable_graph(tmp_path / "model.onnx", tmp_path / "work"))
    sizes = {each.name: list(each.dims) for each in written.graph.initializer}
    assert {node.output[0]: sizes[node.input[2]] for node in written.graph.node} == shapes
