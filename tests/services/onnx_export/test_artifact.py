"""The output folder: complete on its own, in the form that other stages and runtimes expect."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.models.onnx_models import Exported


@pytest.fixture(scope="module")
def tied(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    from slipway.stage import Context
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    context = Context(workdir=tmp_path_factory.mktemp("tied"))
    return Exported(STAGE.run({"pytorch": family("qwen3-tied")}, OnnxExportParams(), context)["onnx"], context.facts)


def test_files(tied: Exported) -> None:
    names = {path.name for path in tied.folder.iterdir()}
    assert {"model.onnx", "model.onnx.data", "onnx_export.json", "example.py"} <= names
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.endswith((".safetensors", ".pt", ".bin")) for name in names)


def test_record(tied: Exported) -> None:
    record = json.loads((tied.folder / "onnx_export.json").read_text())
    assert (record["engine"], record["opset"], record["precision"]) == ("mobius", 23, "float32")
    assert record["architecture"] == "Qwen3ForCausalLM"
    assert record["parity"] == "passed"
    assert 0 <= tied.facts["parity_max_abs_diff"] < 1e-4
    assert not {"parity_max_abs_diff", "parity_scale"} & record.keys(), "they depend on the number of threads"
    assert record["nodes"] == len(tied.onnx.graph.node)
    assert record["data_bytes"] == (tied.folder / "model.onnx.data").stat().st_size
    assert tied.facts["seconds"] > 0


def test_interface(tied: Exported) -> None:
    def axes(values: object) -> dict[str, list[str | int]]:
        return {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
        }

    inputs, outputs = axes(tied.onnx.graph.input), axes(tied.onnx.graph.output)
    assert inputs["input_ids"] == inputs["position_ids"] == ["batch", "sequence"]
    assert inputs["attention_mask"] == ["batch", "total_sequence"]
    assert inputs["past_key_values.1.value"] == ["batch", 2, "past_sequence", 32]
    assert outputs["logits"] == ["batch", "sequence", 128]
    assert outputs["present.0.key"] == ["batch", 2, "total_sequence", 32]
    assert (len(inputs), len(outputs)) == (3 + 4, 1 + 4)


def test_fixed_batch(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    exported = export(family("llama"), shapes="batch")
    shapes = {value.name: value.type.tensor_type.shape.dim for value in exported.onnx.graph.input}
    assert [dim.dim_value for dim in shapes["input_ids"]] == [1, 0]
    assert shapes["past_key_values.0.key"][0].dim_value == 1


def test_weights_are_stored_once_and_as_documented(tied: Exported, family: Callable[[str], Path]) -> None:
    """Each matrix transposed under ``name.T``; the tied embedding as it is, read by Gather and by lm_head's Transpose."""
    from onnx import numpy_helper
    from safetensors.torch import load_file

    weights = load_file(family("qwen3-tied") / "model.safetensors")
    import onnx

    model = onnx.load(tied.folder / "model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    used = {name for node in model.graph.node for name in node.input}
    assert set(stored) <= used
    for name, tensor in weights.items():
        folded = tensor.dim() == 2 and name != "model.embed_tokens.weight"
        np.testing.assert_array_equal(stored[name + ".T"].T if folded else stored[name], tensor.numpy())
    readers = sorted(node.op_type for node in model.graph.node if "model.embed_tokens.weight" in node.input)
    assert readers == ["Gather", "Transpose"]
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.output[0] != "logits":
            assert node.input[1].endswith(".weight.T")


@pytest.mark.parametrize("params", [{"engine": "legacy"}, {"engine": "mobius", "opset": 18}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_linear_layers_look_alike_from_every_engine(
    family: Callable[[str], Path], export: Callable[..., Exported], name: str, params: dict[str, object]
) -> None:
    graph = export(family(name), **params).onnx.graph
    stored = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert not [node for node in graph.node if node.op_type == "Gemm"]
    assert not [
        node for node in graph.node if node.op_type == "Transpose" and node.input[0] in stored and name != "gpt2"
    ]
    linear = [node for node in graph.node if node.op_type == "MatMul" and len(stored.get(node.input[1], ())) == 2]
    assert len(linear) >= 2 * 4


def test_external_data_is_aligned(tied: Exported) -> None:
    for tensor in tied.onnx.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place:
            assert len(tensor.raw_data) <= 1024
            continue
        length = int(place["length"])
        assert place["location"] == "model.onnx.data"
        assert int(place["offset"]) % (4096 if length >= 4096 else 64) == 0


@pytest.mark.parametrize("params", [{}, pytest.param({"engine": "legacy"}, marks=pytest.mark.slow)], ids=str)
def test_standard_operators_only_when_asked(
    family: Callable[[str], Path], export: Callable[..., Exported], params: dict[str, object]
) -> None:
    for choice in ({"optimization": "basic"}, {"runtime": "tensorrt"}):
        graph = export(family("qwen3-tied"), **params, **choice).onnx.graph
        assert {node.domain for node in graph.node} == {""}


def test_example_generates_what_transformers_generates(tied: Exported, family: Callable[[str], Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = "the one that was in"
    source = family("qwen3-tied")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    done = subprocess.run(
        [sys.executable, str(tied.folder / "example.py"), prompt, "--max-new-tokens", "12"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert done.stdout.rstrip("\n") == prompt + tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("params", [{}, pytest.param({"engine": "legacy"}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2"])
def test_tensorrt_parses_its_graph(
    family: Callable[[str], Path], export: Callable[..., Exported], name: str, params: dict[str, object]
) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    exported = export(family(name), runtime="tensorrt", **params)
    assert exported.opset <= 20
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    parsed = parser.parse_from_file(str(exported.folder / "model.onnx"))
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]
    assert network.num_outputs == 5


def test_same_input_same_bytes(tied: Exported, family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    again = export(family("qwen3-tied"))
    for name in ("model.onnx", "model.onnx.data"):
        assert (again.folder / name).read_bytes() == (tied.folder / name).read_bytes()


def test_parity_is_skipped_with_a_warning_beyond_the_memory(family: Callable[[str], Path], tmp_path: Path) -> None:
    from slipway.stage import Context
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    context = Context(workdir=tmp_path, max_memory_bytes=1000)
    STAGE.run({"pytorch": family("llama")}, OnnxExportParams(), context)
    assert context.facts["parity"] == "skipped"
    assert "not compared" in context.facts["warnings"][0]


def test_progress_counts_bytes_to_the_end(family: Callable[[str], Path], tmp_path: Path) -> None:
    from slipway.stage import Context
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    seen = []
    context = Context(workdir=tmp_path, on_progress=seen.append)
    STAGE.run({"pytorch": family("llama")}, OnnxExportParams(), context)
    weights = [progress for progress in seen if progress.phase == "weights"]
    assert len(weights) > 15
    assert [progress.done for progress in weights] == sorted(progress.done for progress in weights)
    assert weights[-1].done == weights[-1].total <= context.facts["data_bytes"]
    parity = [progress for progress in seen if progress.phase == "parity"]
    assert len(parity) == 2 * context.facts["parity_calls"] + 2  # every call of both, before loading and at the end
    assert parity[-1].done == parity[-1].total
