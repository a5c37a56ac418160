"""Rows looked up in integers, and products with them, stay integers in the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("slipway_openvino.library", reason="openvino is not installed", exc_type=ImportError)

from slipway_openvino.graphs.integers import sign_integers
from slipway_openvino.graphs.lookups import readable_graph
from slipway_openvino.library import ov
from support.models.openvino_models import held_types

ROWS, SIZE = 64, 32


def tied(path: Path, *, bits: int, groups: int, zeros: bool, seed: int = 0) -> np.ndarray:
    """Write a graph as the quantize stage does, whose rows are looked up and multiplied; return its weights (rows, columns)."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (ROWS, groups, SIZE * bits // 8), dtype=np.uint8)
    scales = random.random((ROWS, groups), dtype=np.float32).astype(np.float16).astype(np.float32)
    points = random.integers(0, 2**bits, (ROWS, groups), dtype=np.uint8)
    even = np.pad(points, ((0, 0), (0, groups % 2)))
    packed = points if bits == 8 else even[:, 0::2] | (even[:, 1::2] << 4)
    columns = groups * SIZE
    stored = {"data": data, "scale": scales, "shape": np.array([ROWS, groups, 1]), "whole": np.array([0, 0, columns])}
    stored |= {"point": points[:, :, None], "packed": packed} if zeros else {}
    shared, row_zero, zero = {"bits": bits, "block_size": SIZE}, ["point"] * zeros, ["packed"] * zeros
    nodes = [
        helper.make_node("Reshape", ["scale", "shape"], ["row_scale"]),
        helper.make_node("GatherBlockQuantized", ["data", "ids", "row_scale", *row_zero], ["groups"], domain="com.microsoft", gather_axis=0, quantize_axis=2, **shared),
        helper.make_node("Reshape", ["groups", "whole"], ["rows"]),
        helper.make_node("MatMulNBits", ["rows", "data", "scale", *zero], ["out"], domain="com.microsoft", K=columns, N=ROWS, **shared),
    ]  # fmt: skip
    save(path, nodes, ["a", "b"], ["out"], stored)
    codes = data if bits == 8 else np.stack([data & 15, data >> 4], -1).reshape(ROWS, groups, SIZE)
    middle = points[:, :, None] if zeros else 2 ** (bits - 1)
    return ((codes.astype(np.float32) - middle) * scales[:, :, None]).reshape(ROWS, columns)


def save(path: Path, nodes: list[Any], ids: list[Any], outputs: list[str], stored: dict[str, np.ndarray]) -> None:
    given = [helper.make_tensor_value_info("ids", TensorProto.INT64, ids)]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    constants = [numpy_helper.from_array(values, name) for name, values in stored.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.mark.parametrize("groups", [4, 3], ids=["even", "odd"])
@pytest.mark.parametrize("zeros", [False, True], ids=["signed", "zero_points"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_kept_by_the_plugin(bits: int, zeros: bool, groups: int, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    weights = tied(tmp_path / "model.onnx", bits=bits, groups=groups, zeros=zeros)
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
    save(tmp_path / "model.onnx", nodes, [1], list(shapes), stored)
    written = onnx.load(readable_graph(tmp_path / "model.onnx", tmp_path / "work"))
    sizes = {each.name: list(each.dims) for each in written.graph.initializer}
    assert {node.output[0]: sizes[node.input[2]] for node in written.graph.node} == shapes
