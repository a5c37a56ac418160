"""The stage: a decoder with state that computes what PyTorch does, integers as they were chosen, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipway.errors import OpenVinoExportError
from slipway.proof.runtime import Step, Unusable, plain_step
from slipway.stage import Context
from slipway_openvino.runtime import load
from slipway_quantize.stage import STAGE as QUANTIZE
from support.models.openvino_models import converted, exported, held_types
from support.models.quantize_models import onnx_logits, prompt, torch_logits


def step_of(ids: np.ndarray) -> Step:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return Step(ids, np.ones_like(ids), positions)


def test_a_decoder_keeps_its_state_and_computes_what_pytorch_does(folder: Path, pytorch: Path) -> None:
    """Its plugin also fuses attention with the cache, which the form of the graph decides."""
    model = load(folder, threads=1)
    model.prepare_comparison()
    tokens = prompt()
    wanted = torch_logits(pytorch, tokens)
    found, _ = model.forward(step_of(tokens))
    assert abs(found - wanted).max() < 1e-4
    past, row = None, [int(token) for token in tokens[0]]
    for index, token in enumerate(row):
        logits, past = model.forward(plain_step([token], past=past, past_length=index))
        assert abs(logits[0, 0] - wanted[0, index]).max() < 1e-4
    _, old = model.forward(plain_step(row[:2], past=None, past_length=0))
    model.forward(plain_step(row[:3], past=None, past_length=0))
    with pytest.raises(Unusable, match="overwritten"):
        model.forward(plain_step(row[2:3], past=old, past_length=2))
    kinds = [
        node.get_rt_info()["layerType"].astype(str) for node in model._graph.compiled.get_runtime_model().get_ops()
    ]
    assert kinds.count("ScaledDotProductAttention") == 2
    assert "Softmax" not in kinds


def test_the_folder_has_the_names_that_other_programs_expect(folder: Path) -> None:
    import openvino

    record = json.loads((folder / "openvino_export.json").read_text())
    assert record["inputs"] == ["input_ids", "attention_mask", "position_ids", "beam_idx"]
    assert record["outputs"] == ["logits"]
    assert record["precision"] == "fp32"
    model = openvino.Core().read_model(folder / "openvino_model.xml")
    variables = {variable.info.variable_id for variable in model.get_variables()}
    assert variables == {f"past_key_values.{n}.{part}present.{n}.{part}" for n in range(2) for part in ("key", "value")}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("level", "dtype"), [("int4", "float32"), ("int8", "float32"), ("int4", "bfloat16")])
def test_integers_are_those_of_the_graph(graph: Path, tmp_path: Path, level: str, dtype: str) -> None:
    import openvino

    if dtype == "bfloat16":  # whose scales are stored in 16 bits
        graph = shutil.copytree(graph, tmp_path / "half")
        config = json.loads((graph / "config.json").read_text())
        (graph / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    work = tmp_path / "quantize"
    work.mkdir()
    asked = QUANTIZE.params(
        format="onnx", level=level, head_bits=4, accuracy_level=1, check=False
    )  # products in float32
    rounded = QUANTIZE.run({"model": graph}, asked, Context(workdir=work))["model"]
    (tmp_path / "second").hardlink_to(rounded / "model.onnx.data")  # as an artifact's files have one
    folder, _ = converted(rounded, tmp_path / "work", level=level, tokenizer=False)
    model = load(folder, threads=1)
    assert model.engine.stored_dtype == level
    model.prepare_comparison()
    tokens = prompt()
    assert (
        abs(model.forward(step_of(tokens))[0] - onnx_logits(rounded, tokens)).max() < 5e-4
    )  # scales in half precision
    kinds = {
        node.get_output_element_type(0).get_type_name(): node
        for node in openvino.Core().read_model(folder / "openvino_model.xml").get_ops()
        if node.get_type_name() == "Constant"
    }
    kind = {"int4": "i4", "int8": "i8"}[level]
    assert kind in kinds
    assert not {"u4", "u8"} & kinds.keys()
    held = held_types(folder / "openvino_model.xml")
    assert held["FullyConnected"] == {kind}
    assert kind in held["Gather"]  # the other tables are those of the rotary angles
    assert (folder / "openvino_model.bin").stat().st_size < (rounded / "model.onnx.data").stat().st_size


def test_nothing_reports_its_use() -> None:
    code = "import threading, slipway_openvino.convert, openvino.tools.ovc as ovc; print(ovc.telemetry.__class__.__module__, threading.active_count())"
    said = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["openvino.tools.ovc.telemetry_stub", "1"]


def test_two_conversions_have_the_same_bytes(graph: Path, folder: Path, tmp_path: Path) -> None:
    again, _ = converted(graph, tmp_path / "work", tokenizer=False)
    names = sorted(path.name for path in folder.iterdir())
    assert [(again / name).read_bytes() for name in names] == [(folder / name).read_bytes() for name in names]


def test_a_folder_without_its_graph_is_refused(graph: Path, tmp_path: Path) -> None:
    shutil.copytree(graph, tmp_path / "graph", ignore=shutil.ignore_patterns("model.onnx*"))
    with pytest.raises(OpenVinoExportError, match=r"no model\.onnx") as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == "ONNX_INVALID"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "OPENVINO_CONVERSION_FAILED"),  # a graph of nothing
        (b"no graph", "ONNX_INVALID"),
        (b"\x08\x08" + bytes(64), "ONNX_INVALID"),  # a field without a number
    ],
    ids=["empty", "text", "zeros"],
)
def test_a_damaged_graph_is_refused(graph: Path, tmp_path: Path, content: bytes, reason: str) -> None:
    shutil.copytree(graph, tmp_path / "graph", ignore=shutil.ignore_patterns("model.onnx*"))
    (tmp_path / "graph" / "model.onnx").write_bytes(content)
    with pytest.raises(OpenVinoExportError) as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == reason


def test_a_graph_with_weights_outside_its_folder_is_refused(graph: Path, tmp_path: Path) -> None:
    import onnx

    shutil.copytree(graph, tmp_path / "graph")
    model = onnx.load(tmp_path / "graph" / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    (tmp_path / "graph" / "model.onnx").write_bytes(model.SerializeToString())
    shutil.copyfile(graph / "model.onnx.data", tmp_path / "secret")
    with pytest.raises(OpenVinoExportError) as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == "OPENVINO_CONVERSION_FAILED"


@pytest.mark.parametrize("location", ["../secret", "model.onnx", "sub/weights"])
def test_only_files_beside_a_rewritten_graph_are_linked(location: str, tmp_path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from slipway_openvino.graphs.lookups import readable_graph

    (tmp_path / "graph").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "secret").write_bytes(bytes(64))
    scales = numpy_helper.from_array(np.ones((4, 2), np.float32), "scales")
    scales.ClearField("raw_data")
    scales.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "32")):
        scales.external_data.add(key=key, value=value)
    shape = numpy_helper.from_array(np.array([4, 2, 1]), "shape")
    data = numpy_helper.from_array(np.zeros((4, 8), np.uint8), "data")
    nodes = [
        helper.make_node("Reshape", ["scales", "shape"], ["reshaped"]),
        helper.make_node("GatherBlockQuantized", ["data", "ids", "reshaped"], ["out"], domain="com.microsoft"),
    ]
    given = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1])]
    made = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 8])]
    graph = helper.make_graph(nodes, "g", given, made, [scales, shape, data])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    (tmp_path / "graph" / "model.onnx").write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    )
    with pytest.raises(ValueError, match="no file beside it"):
        readable_graph(tmp_path / "graph" / "model.onnx", tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
    assert onnx.load(tmp_path / "graph" / "model.onnx", load_external_data=False).graph.name == "g"


def test_a_graph_with_other_inputs_is_refused(graph: Path, tmp_path: Path) -> None:
    import onnx

    shutil.copytree(graph, tmp_path / "graph")
    model = onnx.load(tmp_path / "graph" / "model.onnx", load_external_data=False)
    model.graph.input[0].name = "strange"
    for node in model.graph.node:
        node.input[:] = ["strange" if name == "input_ids" else name for name in node.input]
    (tmp_path / "graph" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OpenVinoExportError) as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == "ONNX_INVALID"


def test_a_graph_of_fixed_shapes_is_refused(pytorch: Path, tmp_path: Path) -> None:
    """Its state could not grow."""
    fixed = exported(pytorch, tmp_path / "export", shapes="static")
    with pytest.raises(OpenVinoExportError, match="of another shape") as caught:
        converted(fixed, tmp_path / "work")
    assert caught.value.reason == "ONNX_INVALID"
