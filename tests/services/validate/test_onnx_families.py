"""Graphs of every family are judged: right ones pass, one without the adapter and one that ignores the mask fail by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from slipway.proof.runtime import Step
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.runner.onnx_graphs.load import load
from support.models import judged_families
from support.models.sentence_models import write_modules
from support.models.validated_here import Validated

SLOW = pytest.mark.slow
OTHERS = ("t5", "whisper", "moonshine", "bert-answers", "bert-embeddings", "qwen3-classes")
"""Those whose graphs are read in another way; heads and figures are judged in ``test_families.py``."""


def exported(source: Path, work: Path) -> Path:
    work.mkdir()
    return EXPORT.run({"pytorch": source}, OnnxExportParams(parity="never"), Context(workdir=work))["onnx"]


def ignore_mask(folder: Path, copy: Path) -> Path:
    """Copy a folder, and let every graph read a mask of ones in place of its own."""
    shutil.copytree(folder, copy)
    for path in copy.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for name in ("attention_mask", "encoder_attention_mask"):
            for node in model.graph.node:
                for at, given in enumerate(node.input):
                    if given == name:
                        node.input[at] = "ones"
            if any("ones" in node.input for node in model.graph.node) and not _made(model):
                for value, made in ((0, "nothing"), (1, "one")):
                    model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), made))
                model.graph.node.insert(0, helper.make_node("Mul", [name, "nothing"], ["none"]))
                model.graph.node.insert(1, helper.make_node("Add", ["none", "one"], ["ones"]))
        onnx.save(model, path)
    return copy


def _made(model: onnx.ModelProto) -> bool:
    return any("ones" in node.output for node in model.graph.node)


@pytest.mark.parametrize("name", ["bert-classes", *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def test_right_graphs_pass_and_wrong_ones_fail_by_name(name: str, tmp_path: Path) -> None:
    model = judged_families.make(name, tmp_path / name)
    merged = model.output("pytorch", model.merged())
    if name == "bert-embeddings":
        for folder in (model.base, merged):
            write_modules(folder, normalized=True)
    right = exported(merged, tmp_path / "right")
    (tmp_path / "work").mkdir()
    run = Validated(model.base, model.adapter, tmp_path / "work", merged=merged)
    outputs = {"onnx": right}
    for level in ("fp16", "int8"):
        (work := tmp_path / level).mkdir()
        params = QuantizeParams(format="onnx", level=level, group_size=16)  # few results average little noise out
        outputs[f"onnx-{level}"] = QUANTIZE.run({"model": right}, params, Context(workdir=work))["model"]
    for output, folder in outputs.items():
        found = run.output(output, folder)
        assert found.passed, f"{output}: {found.explanation}"
        assert found.engine is not None
        assert found.engine.runtime == "onnxruntime"
        assert any(case.name == "sentence_embedding" for case in found.cases) is (name == "bert-embeddings")
    if name in ("bert-classes", "t5"):  # a verdict on a text's and on a pair's results, whatever head gave them
        lost = run.output("onnx-noop", exported(model.base, tmp_path / "noop"))
        assert lost.explanation.startswith("broken: it behaves like the base model: the adapter is missing from it")
    if name not in ("whisper", "moonshine"):  # sounds of one length have no padding
        blind = run.output("onnx-blind", ignore_mask(right, tmp_path / "blind"))
        broken = {check.name.partition(".")[0] for check in blind.failed_checks}
        assert {"right_padded", "left_padded", "decode_right_padded", "sentence_embedding"} & broken
        assert not {"mean_kl", "relative_error"} & broken  # without padding it is right


def test_the_vector_of_a_text_is_read_and_other_results_are_not(tmp_path: Path) -> None:
    """A graph may give activations too, which nothing compares here."""
    table = np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"]),
        helper.make_node("ReduceMean", ["last_hidden_state"], ["sentence_embedding"], axes=[1], keepdims=0),
        helper.make_node("Identity", ["last_hidden_state"], ["embeddings"]),
    ]
    shapes = {"last_hidden_state": ["b", "s", 4], "sentence_embedding": ["b", 4], "embeddings": ["b", "s", 4]}
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    ids = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["b", "s"])
    graph = helper.make_graph(nodes, "g", [ids], outputs, [numpy_helper.from_array(table, "table")])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 16}')
    model, tokens = load(tmp_path, threads=1), np.array([[3, 1, 15]])
    assert model.embeds is True
    (vector,) = model.embed(Step(tokens, np.ones_like(tokens), np.arange(3)[None]))
    np.testing.assert_allclose(vector[0], table[tokens[0]].mean(0), atol=1e-6)
