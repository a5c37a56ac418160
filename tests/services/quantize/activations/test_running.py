"""Graphs run on text with the memory of one layer, and results are compared some positions at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.errors import QuantizationError
from slipway.model.families import DECODER
from slipway_quantize.activations.running import feeds
from slipway_quantize.activations.trial import measure_divergence

WIDTH, LAYERS = 1024, 40
VOCABULARY = 1 << 17
GROWTH = """
import sys, threading
from pathlib import Path
import numpy as np
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024
def growth(work):
    before, peak, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for _ in range(5):
        work()
    done.set()
    watcher.join()
    return peak[0] - before
"""
RUN = """
from slipway.stage import Context
from slipway_quantize.activations.running import TextGraph
from slipway_quantize.graphs.folder import load_graph
folder, width = Path(sys.argv[1]), int(sys.argv[2])
graph = TextGraph(load_graph(folder, "model.onnx"), folder, Context(workdir=folder))
values = np.ones((32, width), np.float32)
print(growth(lambda: graph.compute(["y"], {"x": values})))
"""
COMPARE = """
from slipway.model.families import DECODER
from slipway_quantize.activations.trial import measure_divergence
logits = np.ones((1, 64, int(sys.argv[1])), np.float32)
print(growth(lambda: measure_divergence({"logits": logits}, {"logits": logits}, DECODER)))
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def growth(code: str, *arguments: object) -> int:
    """Return by how many MiB the anonymous memory of a process grows at most while it does something."""
    command = [sys.executable, "-c", GROWTH + code, *map(str, arguments)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def stack_of_integers(folder: Path) -> None:
    """Write products one after another, whose weights are int8 and become float32 in front of each."""
    random = np.random.default_rng(0)
    nodes, constants, value = [], [numpy_helper.from_array(np.array(0.01, np.float32), "scale")], "x"
    for layer in range(LAYERS):
        weight = random.integers(-9, 9, (WIDTH, WIDTH), np.int8)
        constants.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("DequantizeLinear", [f"w{layer}", "scale"], [f"f{layer}"]))
        result = "y" if layer == LAYERS - 1 else f"y{layer}"
        nodes.append(helper.make_node("MatMul", [value, f"f{layer}"], [result]))
        value = result
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")


@pytest.mark.slow
@on_linux
def test_weights_become_floats_one_at_a_time(tmp_path: Path) -> None:
    """All of them as floats are 160 MiB, one is 4."""
    stack_of_integers(tmp_path)
    assert growth(RUN, tmp_path, WIDTH) < 40


@pytest.mark.slow
@on_linux
def test_results_are_compared_without_copies_of_all_of_them() -> None:
    """Eight positions of the logits are 8 MiB in float64, and six such arrays are there at once; all positions would be 384 MiB."""
    assert growth(COMPARE, VOCABULARY) < 100


def test_the_divergence_is_the_mean_over_all_positions() -> None:
    random = np.random.default_rng(0)
    one, other = random.standard_normal((2, 1, 21, 50), np.float32)
    p, q = (np.exp(each.astype(np.float64)) for each in (one, other))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    expected = float((p * np.log(p / q)).sum(-1).mean())
    found = measure_divergence({"logits": one}, {"logits": other}, DECODER)
    assert found == pytest.approx(expected, rel=1e-9)
    assert measure_divergence({"logits": one}, {"logits": one}, DECODER) == 0


def asked(name: str, *shape: int | str, dtype: str = "tensor(float)") -> SimpleNamespace:
    """An input as ONNX Runtime describes it."""
    return SimpleNamespace(name=name, shape=list(shape), type=dtype)


def test_states_are_zeros_before_the_first_token() -> None:
    inputs = [
        asked("input_ids", "batch", "sequence"),
        asked("past_key_values.0.conv_state", "batch", 8, 3, dtype="tensor(float16)"),
        asked("past_key_values.0.recurrent_state", "batch", 2, 4, 5),
        asked("past_key_values.1.key", "batch", 2, "past_sequence", 4),
    ]
    made = feeds(inputs, np.arange(6))
    assert [made[each.name].shape for each in inputs] == [(1, 6), (1, 8, 3), (1, 2, 4, 5), (1, 2, 0, 4)]
    assert made["past_key_values.0.conv_state"].dtype == np.float16
    assert not made["past_key_values.0.recurrent_state"].any()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("past_key_values.0.key", ("batch", 2, 16, 4)),  # of a fixed length
        ("past_key_values.0.recurrent_state", ("batch", 1 << 20, 1 << 20, 1 << 20)),
        ("past_key_values.0.table", ("batch", 2, 3)),
    ],
)
def test_a_cache_of_another_kind_is_refused(name: str, shape: tuple[int | str, ...]) -> None:
    with pytest.raises(QuantizationError, match="is unknown or fixed") as caught:
        feeds([asked(name, *shape)], np.arange(6))
    assert caught.value.reason == "CALIBRATION_UNSUPPORTED"
