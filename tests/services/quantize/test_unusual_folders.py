"""Folders that no stage of Slipway wrote: each has its reason, or is quantized without the check that does not apply."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from slipway.errors import ModelExportError
from slipway.stage import Context

Quantize = Callable[..., tuple[Path, Context]]


def changed_config(source: Path, folder: Path, **changes: Any) -> Path:
    """Copy a model and change its ``config.json``."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def changed_graph(source: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """Copy an ONNX folder and change its graph."""
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"bits": 4}}, "unnamed"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
)
def test_a_model_that_is_quantized_in_any_way_is_refused(
    quantize: Quantize, tiny: Path, tmp_path: Path, changes: dict[str, Any], method: str
) -> None:
    with pytest.raises(ModelExportError, match=method) as caught:
        quantize(changed_config(tiny, tmp_path / "source", **changes), format="pytorch", level="bf16")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": 7}, {"hidden_size": "wide"}, {"layer_types": [3, 3]}, {"quantization_config": ["x"]}],
)
def test_impossible_settings_of_a_model(
    quantize: Quantize, tiny: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelExportError) as caught:
        quantize(changed_config(tiny, tmp_path / "source", **changes), format="pytorch", level="int8")
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize("changes", [{"vocab_size": "many"}, {"vocab_size": None, "text_config": None}])
def test_the_check_of_a_graph_does_not_depend_on_its_config(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    _, ctx = quantize(changed_config(tiny_onnx, tmp_path / "source", **changes), format="onnx", level="int8")
    assert ctx.facts["check"] == "passed"


def add_input(graph: onnx.GraphProto) -> None:
    graph.input.append(onnx.helper.make_tensor_value_info("pixel_values", onnx.TensorProto.FLOAT, ["batch", 3]))


def rename_logits(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.output[:] = ["scores" if name == "logits" else name for name in node.output]
    next(value for value in graph.output if value.name == "logits").name = "scores"


@pytest.mark.parametrize(("change", "name"), [(add_input, "pixel_values"), (rename_logits, "logits")])
def test_a_graph_whose_inputs_or_outputs_are_unknown_is_not_judged(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None], name: str
) -> None:
    _, ctx = quantize(changed_graph(tiny_onnx, tmp_path / "source", change), format="onnx", level="int8")
    assert ctx.facts["check"].startswith("not run")
    assert name in ctx.facts["check"]


def first_stored(graph: onnx.GraphProto) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.external_data)


def turn_into_texts(graph: onnx.GraphProto) -> None:
    first_stored(graph).data_type = onnx.TensorProto.STRING


def turn_negative(graph: onnx.GraphProto) -> None:
    first_stored(graph).dims[0] *= -1


@pytest.mark.parametrize("level", ["fp16", "int8"])
@pytest.mark.parametrize("change", [turn_into_texts, turn_negative])
def test_impossible_weights_of_a_graph(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None], level: str
) -> None:
    with pytest.raises(ModelExportError) as caught:
        quantize(changed_graph(tiny_onnx, tmp_path / "source", change), format="onnx", level=level)
    assert caught.value.reason == "ONNX_INVALID"


@pytest.mark.parametrize("operator", ["MatMul", "Gather"])
def test_a_node_without_its_second_input(quantize: Quantize, tiny_onnx: Path, tmp_path: Path, operator: str) -> None:
    def cut(graph: onnx.GraphProto) -> None:
        del next(node for node in graph.node if node.op_type == operator).input[1:]

    with pytest.raises(ModelExportError) as caught:
        quantize(changed_graph(tiny_onnx, tmp_path / "source", cut), format="onnx", level="int8")
    assert caught.value.reason == "QUANTIZATION_FAILED"


def test_weights_under_another_usual_name_are_not_copied_too(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path
) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                entry.value = "model.onnx_data" if entry.key == "location" else entry.value

    source = changed_graph(tiny_onnx, tmp_path / "source", rename)
    (source / "model.onnx.data").rename(source / "model.onnx_data")
    result, ctx = quantize(source, format="onnx", level="int8")
    assert not (result / "model.onnx_data").exists()
    assert ctx.facts["reduction"] > 0.5


def test_a_single_file_is_preferred_to_an_index(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    """As transformers does, so that what is loaded is what was quantized."""
    source = changed_config(tiny, tmp_path / "source")
    (source / "model.safetensors.index.json").write_text("{}")
    _, ctx = quantize(source, format="pytorch", level="bf16")
    assert ctx.facts["check"] == "passed"


def test_the_same_tensor_in_two_shards(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    source = changed_config(tiny, tmp_path / "source")
    (source / "model.safetensors").rename(source / "a.safetensors")
    shutil.copyfile(source / "a.safetensors", source / "b.safetensors")
    weight_map = {"model.norm.weight": "a.safetensors", "model.embed_tokens.weight": "b.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelExportError, match="too") as caught:
        quantize(source, format="pytorch", level="bf16")
    assert caught.value.reason == "SAFETENSORS_CORRUPT"
