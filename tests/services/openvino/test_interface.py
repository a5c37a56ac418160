"""What a graph must have to become an IR, and what a runtime says of one; on graphs of a few nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipway.errors import OpenVinoExportError
from slipway.model.families import DECODER, SEQUENCE_CLASSIFIER, Family
from slipway_openvino.graphs.state import text_interface
from slipway_openvino.library import error_summary, ops, ov
from slipway_openvino.params import MODEL
from slipway_openvino.runtime import EXACT, ROUNDED, _Graph

CACHE = [-1, 2, -1, 4]


def model_of(inputs: dict[str, list[int]]) -> ov.Model:
    """Return a graph that gives back each input: ``input_ids`` as logits, a past as its present."""
    parameters = [ops.parameter(shape, np.float32, name=name) for name, shape in inputs.items()]
    results = []
    for name, parameter in zip(inputs, parameters, strict=True):
        parameter.output(0).set_names({name})
        results.append(ops.result(ops.relu(parameter)))
        given = {"input_ids": "logits"}.get(name, name.replace("past_key_values.", "present."))
        results[-1].output(0).set_names({given if given != name else f"{name}.out"})
    return ov.Model(results, parameters, "g")


@pytest.mark.parametrize(
    ("family", "inputs", "said"),
    [
        (SEQUENCE_CLASSIFIER, {"input_ids": [-1, -1], "token_type_ids": [-1, -1]}, ""),
        (SEQUENCE_CLASSIFIER, {"input_ids": [-1, -1], "position_ids": [-1, -1]}, r"unknown \['position_ids'\]"),
        (DECODER, {"input_ids": [-1, -1], "position_ids": [-1, -1], "past_key_values.0.key": CACHE}, ""),
        (DECODER, {"input_ids": [-1, -1], "token_type_ids": [-1, -1]}, r"unknown \['token_type_ids'\]"),
        (DECODER, {"input_ids": [-1, 4]}, r"of another shape \['input_ids'\]"),
        (DECODER, {"input_ids": [-1, -1], "past_key_values.0.key": [-1, -1, -1, 4]}, "of another shape .'past_key"),
        (DECODER, {"input_ids": [-1, -1], "past_key_values.0.key": [-1, 2, -1, -1]}, "of another shape .'past_key"),
        (DECODER, {"input_ids": [-1, -1], "past_key_values.0.key": [-1, 2, -1]}, "of another shape .'past_key"),
    ],
    ids=("text", "positions of a text", "decoder", "types", "fixed", "any heads", "any width", "three axes"),
)
def test_a_graph_has_the_inputs_that_are_fed(family: Family, inputs: dict[str, list[int]], said: str) -> None:
    """Heads of any number would become variables of none."""
    if not said:
        text_interface(model_of(inputs), family).check(model_of(inputs), "model.onnx")
        return
    with pytest.raises(OpenVinoExportError, match=said) as caught:
        text_interface(model_of(inputs), family).check(model_of(inputs), "model.onnx")
    assert caught.value.reason == "ONNX_INVALID"


def test_float32_with_a_rounded_cache_is_not_the_arithmetic_of_the_comparison(tmp_path: Path) -> None:
    """So plugins serve on processors without bfloat16; the results of one must not stand for the other's."""
    ov.save_model(model_of({"input_ids": [-1, -1]}), tmp_path / MODEL)
    graph = _Graph(tmp_path / MODEL, threads=1)
    found = {}
    for name, options in {"served": {"INFERENCE_PRECISION_HINT": "f32"}, "exact": EXACT}.items():
        graph.compiled = ov.Core().compile_model(tmp_path / MODEL, "CPU", options)
        found[name] = graph.native_dtype
    assert found == {"served": ROUNDED, "exact": "float32"}


def test_an_error_of_the_library_is_one_line() -> None:
    error = RuntimeError(
        "Exception from src/inference/src/cpp/core.cpp:110:\nCheck failed\n\n  at node\x1b[31m x\n" + "y" * 9999
    )
    assert "\n" not in error_summary(error)
    assert error_summary(error).startswith("Check failed at node")
    assert len(error_summary(error)) <= 600
