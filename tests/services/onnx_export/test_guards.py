"""Guards of traced attention: removed for TensorRT, without a change of what real tokens give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slipway_onnx_export.engines.dynamo import remove_guards
from slipway_onnx_export.engines.lowering import MASKED

from .conftest import Exported


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]


@pytest.mark.slow
def test_graphs_for_tensorrt_have_no_guards(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path
) -> None:
    """The export compares the graph with PyTorch, with padding on the left too; float16 can hold its mask."""
    for number, runtime in enumerate(("tensorrt", "onnxruntime")):
        folder = export(family("qwen3-tied"), engine="dynamo", opset=20, runtime=runtime, parity="always").folder
        assert ("IsNaN" in operators(folder)) == bool(number)
    # the other graph, which is left as torch wrote it
    values = [each.const_value for each in ir.load(folder / "model.onnx").graph.initializers.values()]
    assert any(each.size == 1 and each.numpy().min() < -65504 for each in values if each.dtype == ir.DataType.FLOAT)


def attention(hiding: object, *, copies: bool = False) -> ir.Model:
    """Attention's end: scores + mask, softmax, guard; the mask is a choice between 0 and ``hiding`` (None: an input)."""
    seen, scores = (ir.Value(name=name, shape=ir.Shape([2, 4])) for name in ("seen", "scores"))
    seen.type, scores.type = ir.TensorType(ir.DataType.BOOL), ir.TensorType(ir.DataType.FLOAT)
    bias = ir.Value(name="bias", shape=ir.Shape([2, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    constants = {
        name: ir.Value(name=name, const_value=(tensor := ir.tensor(np.float32(value), name=name)), type=ir.TensorType(tensor.dtype))
        for name, value in {"zero": 0.0, "hidden": hiding or 0.0}.items()
    }  # fmt: skip
    choice = ir.node("Where", [seen, constants["zero"], constants["hidden"]])
    mask = bias if hiding is None else choice.outputs[0]
    nodes = [] if hiding is None else [choice]
    if copies:
        nodes.append(ir.node("Concat", [mask, mask], {"axis": 0}))
        nodes.append(ir.node("Slice", [nodes[-1].outputs[0], *(_ints(name, value) for name, value in _HALF.items())]))
        mask = nodes[-1].outputs[0]
    added = ir.node("Add", [scores, mask])
    softmax = ir.node("Softmax", added.outputs, {"axis": -1})
    unknown = ir.node("IsNaN", softmax.outputs)
    guard = ir.node("Where", [unknown.outputs[0], constants["zero"], softmax.outputs[0]])
    result = ir.node("Identity", guard.outputs)
    result.outputs[0].name = "weights"
    result.outputs[0].type, result.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, 4])
    nodes += [added, softmax, unknown, guard, result]
    made = [node.inputs for node in nodes]
    initializers = {id(v): v for inputs in made for v in inputs if v is not None and v.const_value is not None}
    graph = ir.Graph(
        [seen, scores, bias],
        result.outputs,
        nodes=nodes,
        initializers=list(initializers.values()),
        opset_imports={"": 20},
        name="attention",
    )
    return ir.Model(graph, ir_version=9)


_HALF = {"starts": 0, "ends": 2, "axes": 0}


def _ints(name: str, value: int) -> ir.Value:
    tensor = ir.tensor(np.array([value], np.int64), name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("hiding", [-np.inf, -3.4028235e38, -1e5])
def test_rows_with_a_visible_position_stay_as_they_were(hiding: float, copies: bool) -> None:
    import onnxruntime as ort

    model = attention(hiding, copies=copies)
    before = ir.to_proto(model).SerializeToString()
    assert remove_guards(model) == 1
    assert "IsNaN" not in {node.op_type for node in model.graph}
    onnx.checker.check_model(ir.to_proto(model))
    feeds = {
        "seen": np.array([[True, True, False, False], [False] * 4]),
        "scores": np.array([[1, 2, 3, 400], [1, 2, 3, 4]], np.float32),
        "bias": np.zeros((2, 4), np.float32),
    }
    old, new = (
        ort.InferenceSession(each).run(["weights"], feeds)[0]
        for each in (before, ir.to_proto(model).SerializeToString())
    )
    np.testing.assert_array_equal(new[0], old[0])
    assert np.isfinite(new).all()
    assert float(np.float16(MASKED)) == pytest.approx(MASKED, rel=1e-3)


@pytest.mark.parametrize("hiding", [None, -10.0, 0.5])
def test_a_guard_stays_if_its_mask_may_be_meant(hiding: float | None) -> None:
    """A learned bias of -10 is no mask; one from outside may hold minus infinity."""
    model = attention(hiding)
    assert remove_guards(model) == 0
    assert "IsNaN" in {node.op_type for node in model.graph}
