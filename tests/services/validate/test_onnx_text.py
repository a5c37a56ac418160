"""A graph that reads a whole text: of its outputs, those of its family and the text's vector are taken, and activations are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION
from slipway.proof.runtime import Step
from slipway_validate.runner.onnx_graphs.load import OnnxText


def save(folder: Path, *outputs: str) -> Path:
    """Save a table of vectors, whose rows and their mean a graph returns."""
    rows = ["batch", "sequence", 4]
    values = {"last_hidden_state": rows, "hidden_states.0": rows, "sentence_embedding": ["batch", 4]}
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"]),
        helper.make_node("Neg", ["last_hidden_state"], ["hidden_states.0"]),
        helper.make_node("ReduceMean", ["last_hidden_state"], ["sentence_embedding"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, rows[:2])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, values[name]) for name in outputs],
        [numpy_helper.from_array(np.arange(32, dtype=np.float32).reshape(8, 4), "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, folder / "model.onnx")
    return folder


@pytest.mark.parametrize("embeds", [True, False])
def test_the_vector_of_a_text_is_taken_if_there_is_one(tmp_path: Path, embeds: bool) -> None:
    more = ("sentence_embedding",) if embeds else ()
    model = OnnxText(
        save(tmp_path, "last_hidden_state", "hidden_states.0", *more),
        FEATURE_EXTRACTION,
        ModelConfig({}),
        threads=1,
        stored="float32",
    )
    ids = np.array([[1, 3]])
    step = Step(input_ids=ids, attention_mask=np.ones_like(ids), position_ids=np.array([[0, 1]]))
    assert model.embeds is embeds
    assert model.forward(step)[0].shape == (1, 2, 4)
    if embeds:
        assert model.embed(step)[0, 0].tolist() == [8, 9, 10, 11]
