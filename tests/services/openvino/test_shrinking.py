"""Smaller descriptions: nodes that repeat others, targets of Reshape, and indentation go; results stay bit for bit, and names stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway_openvino.graphs.lookups import readable_graph
from slipway_openvino.graphs.merging import drop_idle_conversions, merge_equal_nodes
from slipway_openvino.graphs.passes import is_numbered, number_nodes, sign_integers, simplify_attention
from slipway_openvino.graphs.reshapes import settle_reshapes
from slipway_openvino.graphs.state import attend_to_encoded, drop_cross_attention, make_stateful
from slipway_openvino.library import ops, ov
from slipway_openvino.params import DECODER_GRAPH, ENCODER_GRAPH, MODEL
from slipway_openvino.runtime import EXACT
from slipway_openvino.stored.values import read_description
from slipway_openvino.writing import join_lines, save_model
from support.models.judged_families import make
from support.models.openvino_models import exported, rounded

Given = Mapping[str, np.ndarray]
ROWS = np.array([[5, 9, 12, 30, 4, 7, 8, 21], [1, 1, 1, 6, 9, 30, 3, 5], [1, 1, 1, 1, 1, 40, 2, 11]])
MASK = (np.arange(8) >= np.array([0, 3, 5])[:, None]).astype(np.int64)
CUTS = (0, 5, 6, 7, 8)


def shrunk(model: ov.Model) -> ov.Model:
    small = model.clone()
    drop_idle_conversions(small)
    settle_reshapes(small)
    merge_equal_nodes(small)
    number_nodes(small)
    return small


def run(model: ov.Model, calls: list[Given], options: Mapping[str, str]) -> tuple[list[bytes], Counter[str]]:
    """Return all results of calls that continue each other, and the plugin's layers by kind without constants."""
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, **options})
    request = compiled.create_infer_request()
    found = []
    for given in calls:
        request.infer(dict(given))
        found += [np.array(request.get_tensor(port).data).tobytes() for port in compiled.outputs]
    kinds = Counter(node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops())
    del kinds["Const"]
    return found, kinds


def texts(model: ov.Model) -> list[Given]:
    """Return calls with padded rows: those of a decoder continue each other, in another order of the rows at last."""
    inputs = {port.any_name for port in model.inputs}
    cuts = CUTS if "beam_idx" in inputs else (0, 8)
    positions = np.maximum(MASK.cumsum(axis=1) - 1, 0)
    calls: list[Given] = []
    for begin, end in pairwise(cuts):
        given: dict[str, np.ndarray] = {
            "input_ids": ROWS[:, begin:end],
            "attention_mask": MASK[:, :end],
            "position_ids": positions[:, begin:end],
            "token_type_ids": np.zeros_like(ROWS),
            "beam_idx": np.array([0, 1, 2] if end < len(ROWS[0]) else [1, 0, 2], np.int32),
        }
        calls.append({name: np.ascontiguousarray(value) for name, value in given.items() if name in inputs})
    return calls


def check_same(model: ov.Model, calls: list[Given], *, fewer: float) -> ov.Model:
    small = shrunk(model)
    assert len(small.get_ops()) < fewer * len(model.get_ops())
    for options in (EXACT, {}):
        assert run(small, calls, options) == run(model, calls, options)
    assert interface(small) == interface(model)
    assert weights(small) == weights(model)
    return small


def interface(model: ov.Model) -> Any:
    names = [[sorted(port.names) for port in ports] for ports in (model.inputs, model.outputs)]
    return names, sorted(variable.info.variable_id for variable in model.get_variables())


def weights(model: ov.Model) -> list[tuple[str, str]]:
    """Return names and types of the constants that are known by their names."""
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    named = [node for node in constants if not is_numbered(node.get_friendly_name())]
    return sorted((node.get_friendly_name(), node.get_element_type().get_type_name()) for node in named)


@pytest.mark.parametrize("level", ["", pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_decoder_computes_the_same_bits(graph: Path, tmp_path: Path, level: str) -> None:
    source = rounded(graph, tmp_path / "quantize", level) if level else graph
    model = ov.Core().read_model(readable_graph(source / "model.onnx", tmp_path))
    make_stateful(model)
    integers = sign_integers(model, tmp_path)
    assert (integers is None) == (level == "")
    simplify_attention(model)
    small = check_same(model, texts(model), fewer=0.7)
    kinds = Counter(node.get_type_name() for node in small.get_ops())
    assert kinds["ReadValue"] == kinds["Assign"] == 4
    assert kinds["ConvertLike"] == 0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classifier")
    return exported(make("bert-classes", root).outputs()["pytorch"], root / "graph")


@pytest.mark.slow
def test_an_encoder_computes_the_same_bits(classifier: Path, tmp_path: Path) -> None:
    model = ov.Core().read_model(readable_graph(classifier / "model.onnx", tmp_path))
    simplify_attention(model)
    check_same(model, texts(model), fewer=1.0)


@pytest.mark.slow
def test_an_encoder_and_its_decoder_compute_the_same_bits(tmp_path: Path) -> None:
    folder = exported(make("marian", tmp_path / "model").base, tmp_path / "export")
    for name in ("encoder", "decoder"):
        (tmp_path / name).mkdir()
    encoder = ov.Core().read_model(readable_graph(folder / ENCODER_GRAPH, tmp_path / "encoder"))
    decoder = ov.Core().read_model(readable_graph(folder / DECODER_GRAPH, tmp_path / "decoder"))
    make_stateful(decoder)
    decoder = attend_to_encoded(decoder, encoder.clone())
    encoder = drop_cross_attention(encoder)
    check_same(encoder, texts(encoder), fewer=1.0)
    simplify_attention(decoder)
    size = int(decoder.input("encoder_hidden_states").get_partial_shape()[2].get_length())
    encoded = np.random.default_rng(2).standard_normal((3, 4, size)).astype(np.float32)
    fixed: Given = {"encoder_hidden_states": encoded, "encoder_attention_mask": np.ascontiguousarray(MASK[:, 4:])}
    check_same(decoder, [{**call, **fixed} for call in texts(decoder)], fewer=0.9)


def made(results: list[Any], given: list[ov.Node], sinks: list[ov.Node] | None = None) -> ov.Model:
    return ov.Model([ops.result(each) for each in results], sinks or [], given, "made")


def counted(model: ov.Model) -> Counter[str]:
    merge_equal_nodes(model)
    return Counter(node.get_type_name() for node in model.get_ops())


def numbers() -> ov.Node:
    given = ops.parameter([-1, 4], np.float32, name="given")
    given.output(0).set_names({"given"})
    return given


def random_of(given: ov.Node) -> ov.Node:
    """Return random numbers between the smallest and the largest of the input, so that all their inputs can be shared."""
    axes = ops.constant(np.array([0, 1], np.int64))
    low, high = ops.reduce_min(given, axes), ops.reduce_max(given, axes)
    return ops.random_uniform(ops.shape_of(given), low, high, "f32", 0, 0)


def branch_of(given: ov.Node) -> ov.Node:
    """Return an If: twice the input, or thrice."""
    chosen = ops.if_op(ops.constant(True, dtype=bool))
    inner = [ops.parameter([-1, 4], np.float32) for _ in range(2)]
    bodies = [
        ov.Model([ops.multiply(each, ops.constant(np.float32(times)))], [each], "body")
        for times, each in zip((2, 3), inner, strict=True)
    ]
    chosen.set_then_body(bodies[0])
    chosen.set_else_body(bodies[1])
    chosen.set_input(given.output(0), inner[0], inner[1])
    chosen.set_output(bodies[0].get_results()[0], bodies[1].get_results()[0])
    return chosen


@pytest.mark.parametrize(
    ("make_node", "kind", "left"),
    [(random_of, "RandomUniform", 2), (branch_of, "If", 2), (ops.exp, "Exp", 1)],
    ids=["random", "branch", "plain"],
)
def test_only_results_that_follow_from_inputs_are_shared(
    make_node: Callable[[ov.Node], ov.Node], kind: str, left: int
) -> None:
    given = numbers()
    once, twice = (ops.add(given, make_node(given)) for _ in range(2))
    assert counted(made([ops.concat([ops.negative(once), ops.abs(twice)], 0)], [given]))[kind] == left


def test_equal_nodes_share_unless_attributes_inputs_or_ports_differ() -> None:
    given = numbers()
    axis, other = (ops.constant(value, dtype=np.int64) for value in (1, 0))
    sums = [ops.reduce_sum(given, axis, keep_dims=keep) for keep in (True, True, False)]
    halves = ops.split(given, axis, 2)
    parts = [ops.exp(halves.output(port)) for port in (0, 1, 0)]
    kinds = counted(made([*map(ops.sin, sums), ops.reduce_sum(given, other), *map(ops.cos, parts)], [given]))
    assert kinds["ReduceSum"] == 3
    assert kinds["Exp"] == 2


def test_outputs_of_equal_nodes_keep_their_names() -> None:
    given = numbers()
    results = [ops.exp(ops.add(given, given)) for _ in range(2)]
    for name, result in zip(("first", "second"), results, strict=True):
        result.output(0).set_names({name})
    model = made(results, [given])
    assert counted(model)["Add"] == 1
    assert [port.names for port in model.outputs] == [{"first"}, {"second"}]


def test_states_stay_apart() -> None:
    """Two that begin alike, are read alike, and are given the same."""
    given = numbers()
    begin = [ops.broadcast(ops.constant(np.float32(0)), ops.shape_of(given)) for _ in range(2)]
    values = [ops.read_value(ops.exp(each), name) for each, name in zip(begin, "ab", strict=True)]
    sums = [ops.add(given, value) for value in values]
    sinks = [ops.assign(total, name) for total, name in zip(sums, "ab", strict=True)]
    model = made([ops.concat([ops.sin(each) for each in sums], 0)], [given], sinks)
    kinds = counted(model)
    assert (kinds["ReadValue"], kinds["Assign"], kinds["Add"], kinds["Sin"]) == (2, 2, 2, 2)
    assert (kinds["Broadcast"], kinds["Exp"]) == (1, 1)
    assert {variable.info.variable_id for variable in model.get_variables()} == {"a", "b"}


def test_weights_that_are_equal_stay_apart() -> None:
    """A small one by its name, and a large one with the conversions that belong to each product."""
    given = numbers()
    scales = [ops.constant(np.ones(4, np.float32)) for _ in range(2)]
    for name, scale in zip(("norm.0.weight", "norm.1.weight"), scales, strict=True):
        scale.set_friendly_name(name)
    large = ops.constant(np.ones((64, 4), np.int8))
    wide = [ops.multiply(ops.convert(large, "f32"), ops.constant(np.float32(0.5))) for _ in range(2)]
    products = [
        ops.matmul(ops.multiply(given, scale), each, False, True) for scale, each in zip(scales, wide, strict=True)
    ]
    model = made([ops.concat(products, 0)], [given])
    before = weights(model)
    kinds = counted(model)
    assert weights(model) == before
    assert (kinds["Convert"], kinds["Multiply"], kinds["MatMul"]) == (2, 4, 2)
    assert kinds["Constant"] == 5  # factors stay, too


def repeated_heads(given: ov.Node, order: tuple[int, ...]) -> ov.Node:
    """Return (B, 2, L, 4) as (B, 6, L, 4), by a target of sizes that are read and joined in an order."""
    sizes = ops.shape_of(given)
    zero = ops.constant(0, dtype=np.int64)
    parts = [ops.gather(sizes, ops.constant(np.array([axis], np.int64)), zero) for axis in order]
    parts[1] = ops.multiply(parts[1], ops.constant(np.array([3], np.int64)))
    wanted = ops.constant(np.array([1, 1, 3, 1, 1], np.int64))
    whole = ops.broadcast(
        ops.unsqueeze(given, ops.constant(np.array([2], np.int64))), wanted, broadcast_spec="BIDIRECTIONAL"
    )
    return ops.reshape(whole, ops.concat(parts, 0), special_zero=False)


def heads_of(order: tuple[int, ...], *, is_measured: bool) -> ov.Model:
    given = ops.parameter([-1, 2, -1, 4], np.float32, name="given")
    heads = repeated_heads(given, order)
    zero = ops.constant(0, dtype=np.int64)
    length = ops.gather(ops.shape_of(heads), ops.constant(np.array([2], np.int64)), zero)
    shape = ops.shape_of(heads) if is_measured else ops.constant(np.array([7], np.int64))
    return made([ops.negative(heads), ops.negative(length), ops.negative(shape)], [given])


def targets(model: ov.Model) -> list[list[int] | None]:
    found = []
    for node in model.get_ops():
        if node.get_type_name() == "Reshape":
            target = node.input_value(1).get_node()
            found.append(target.get_data().tolist() if target.get_type_name() == "Constant" else None)
    return found


@pytest.mark.parametrize(
    ("order", "is_measured", "target"),
    [
        ((0, 1, 2, 3), False, [0, 6, -1, 4]),
        ((2, 1, 0, 3), False, None),  # two axes change places: neither is a copy
        ((0, 1, 2, 3), True, None),  # its shape is read as a whole, which plugins follow to the target
    ],
    ids=["kept", "turned", "measured"],
)
def test_a_target_becomes_a_constant_where_it_is_provably_the_same(
    order: tuple[int, ...], is_measured: bool, target: list[int] | None
) -> None:
    model, same = (heads_of(order, is_measured=is_measured) for _ in range(2))
    settle_reshapes(model)
    assert targets(model) == [target]
    for batch, length in ((1, 1), (2, 5), (3, 2)):
        given = np.random.default_rng(3).standard_normal((batch, 2, length, 4)).astype(np.float32)
        found, wanted = (ov.Core().compile_model(each, "CPU")([given]) for each in (model, same))
        for port, other in zip(found.values(), wanted.values(), strict=True):
            assert port.shape == other.shape
            assert port.tobytes() == other.tobytes()


def test_a_target_of_another_value_is_not_taken_for_a_copy() -> None:
    """Two unknown sizes of a second input: they may differ from those of the first, which has as many values."""
    given, other = (ops.parameter([-1, -1, 4], np.float32, name=name) for name in ("given", "other"))
    model = made([ops.negative(ops.reshape(given, ops.shape_of(other), special_zero=False))], [given, other])
    settle_reshapes(model)
    assert targets(model) == [None]
    compiled = ov.Core().compile_model(model, "CPU")
    assert compiled([np.ones((2, 3, 4), np.float32), np.ones((6, 1, 4), np.float32)])[0].shape == (6, 1, 4)


def test_a_description_is_written_without_indentation(tmp_path: Path) -> None:
    """With values that look like indentation between elements."""
    given = numbers()
    result = ops.exp(given)
    result.output(0).set_names({"a>\n\t<b", "plain"})
    result.set_friendly_name("x>\n\t\t<layer name='y'")
    model = made([result], [given])
    model.set_rt_info("one>\n\t<two", ["framework", "note"])
    ov.save_model(model, tmp_path / "indented.xml", compress_to_fp16=False)
    save_model(model, tmp_path / MODEL, halves=False)
    text = (tmp_path / MODEL).read_text()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin", ".xml", ".xml"]
    assert "\t<" not in text
    assert text.count("\n<layer ") == 3
    assert len(text) < 0.9 * (tmp_path / "indented.xml").stat().st_size
    back = ov.Core().read_model(tmp_path / MODEL)
    assert back.output(0).names == {"a>\n\t<b", "plain"}
    assert back.get_rt_info(["framework", "note"]).astype(str) == "one>\n\t<two"
    assert read_description(tmp_path / MODEL) == read_description(tmp_path / "indented.xml")


def test_only_space_between_elements_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"<a>\n\t<b>\n\t\ttext >\n\t\tmore\n\t\t<c />\n\t</b>\n\t<layer />\n</a>\n")
    join_lines(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"<a><b>\n\t\ttext >\n\t\tmore\n\t\t<c /></b>\n<layer /></a>\n"


def test_another_process_writes_the_same_bytes(graph: Path, folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from slipway.stage import Context; from slipway_openvino.stage import STAGE;"
        "graph, work = map(Path, sys.argv[1:]);"
        "STAGE.run({'onnx': graph}, STAGE.params(tokenizer=False), Context(workdir=work))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-P", "-c", code, graph, tmp_path], check=True, env=environment)
    for file in (MODEL, "openvino_model.bin"):
        assert (tmp_path / "openvino" / file).read_bytes() == (folder / file).read_bytes()
