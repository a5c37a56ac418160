"""``slipway inspect``: it shows what a graph returns, holds it to its contract, and refuses hostile files before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.errors import ModelExportError
from slipway.model.activations import CONTRACT, ActivationContract, ContractOutput, GraphContract, GraphReport
from support.commands.cli import in_process

OUTPUT = ContractOutput(
    name="hidden_states.0",
    kind="hidden_states",
    layer=0,
    module="layers.0",
    dtype="float32",
    shape=("batch", "sequence", 4),
)
AGREED = ActivationContract(file="model.onnx", layers=1, outputs=(OUTPUT,))


def small(
    nodes: list[Any] | None = None, *, shape: tuple[Any, ...] = ("batch", "sequence"), weights: tuple[Any, ...] = ()
) -> onnx.ModelProto:
    """An embedding table, whose rows a graph returns."""
    table = numpy_helper.from_array(np.ones((8, 4), np.float32), "table")
    nodes = nodes or [helper.make_node("Gather", ["table", "input_ids"], ["hidden_states.0"])]
    ends = helper.make_tensor_value_info("hidden_states.0", TensorProto.FLOAT, [*("batch", "sequence"), 4])
    given = helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)
    graph = helper.make_graph(nodes, "g", [given], [ends], [table, *weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(small(), tmp_path / "model.onnx")
    AGREED.write(tmp_path)
    return tmp_path


def report(path: Path) -> GraphReport:
    """Inspect a graph in this process."""
    from slipway_onnx_export.inspection.trial import read_graph, run_once

    return run_once(read_graph(path), path, threads=1)


def test_a_graph_is_shown_and_held_to_its_contract(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path_factory.mktemp("home")
    done = in_process(capfd, "inspect", folder, "--json", home=home)
    assert done.code == 0, done.err
    (graph,) = done.json["graphs"]
    assert [(value["name"], value["dtype"], value["found"]) for value in graph["outputs"]] == [
        ("hidden_states.0", "float32", [1, 3, 4])
    ]
    assert graph["inputs"][0]["shape"] == ["batch", "sequence"]
    assert (done.json["contract"], done.json["breaches"]) == ("kept", [])
    other = folder.parent / f"{folder.name}-other.json"
    other.write_text(AGREED.with_dtypes({"hidden_states.0": "float16"}).model_dump_json())
    broken = in_process(capfd, "inspect", folder / "model.onnx", "--contract", other, home=home)
    assert (broken.code, "the contract says float16" in broken.out) == (4, True)
    assert "batch × sequence × 4" in broken.out


def test_a_contract_of_two_graphs_is_held_by_both(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    second = GraphContract(file="decoder.onnx", layers=1, outputs=(OUTPUT,))
    AGREED.model_copy(update={"further": (second,)}).write(folder)
    lacking = in_process(capfd, "inspect", folder, "--json", home=folder)
    assert (lacking.code, lacking.json["breaches"]) == (4, ["there is no decoder.onnx, which the contract describes"])
    assert in_process(capfd, "inspect", folder / "model.onnx", home=folder).code == 0
    onnx.save(small(shape=("batch", 3)), folder / "decoder.onnx")
    assert in_process(capfd, "inspect", folder, home=folder).code == 0
    (folder / "model.onnx").rename(folder / "other.onnx")
    alone = in_process(capfd, "inspect", folder / "other.onnx", home=folder)
    assert (alone.code, "there is no model.onnx" in alone.out) == (4, True)


def test_the_properties_of_a_graph_are_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = small()
    helper.set_model_props(model, {"lineage": "sha256:" + "ab" * 32, "tools": "x" * 9000, "odd\x1b[2J": "a\nb\x1b[2J"})
    onnx.save(model, folder / "model.onnx")
    found = report(folder / "model.onnx").metadata
    assert found["lineage"] == "sha256:" + "ab" * 32
    assert len(found["tools"]) == 500
    assert "a b\ufffd[2J" in found.values()
    assert "\x1b" not in json.dumps(found, ensure_ascii=False)
    done = in_process(capfd, "inspect", folder, home=folder)
    assert f"lineage: sha256:{'ab' * 32}" in done.out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "hidden_states.1"}, "has no output hidden_states.1"),
        ({"dtype": "float16"}, "is float32, and the contract says float16"),
        ({"shape": ("batch", "sequence", 5)}, "has the shape [1, 3, 4]"),
        ({"shape": ("batch", "sequence")}, "has the shape [1, 3, 4]"),
        ({"shape": ("batch", "batch", 4)}, "has the shape [1, 3, 4]"),
        ({"shape": ("x", "x", 4)}, "has the shape [1, 3, 4]"),
    ],
)
def test_each_breach_is_named(folder: Path, changed: dict[str, Any], said: str) -> None:
    contract = AGREED.model_copy(update={"outputs": (OUTPUT.model_copy(update=changed),)})
    found = report(folder / "model.onnx")
    assert found.ran
    assert [said in text for text in found.breaches(contract)] == [True]
    assert list(found.breaches(AGREED)) == []


def _vast() -> onnx.ModelProto:
    shape = numpy_helper.from_array(np.array([2**40], np.int64), "shape")
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["vast"]),
        helper.make_node("ReduceSum", ["vast"], ["sum"]),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Add", ["rows", "sum"], ["hidden_states.0"]),
    ]
    return small(nodes, weights=(shape,))


def _unknown() -> onnx.ModelProto:
    return small([helper.make_node("Nonesuch", ["input_ids"], ["hidden_states.0"], domain="elsewhere")])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: small(shape=(2**40, 2**20)), "would need"),
        (lambda: small(shape=(2**62, 2**62)), "more bytes than any machine has"),
        (_vast, "'vast' would have"),
        (_unknown, "onnxruntime cannot run it"),
        (lambda: small(shape=("batch", -1)), "input_ids"),
    ],
    ids=["large-input", "overflow", "large-inside", "unknown-operator", "negative"],
)
def test_a_graph_that_cannot_run_is_not_run_by_name(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], said: str
) -> None:
    (tmp_path / "model.onnx").write_bytes(make().SerializeToString())
    found = report(tmp_path / "model.onnx")
    assert not found.ran
    assert said in found.not_run
    assert list(found.breaches(AGREED)) == []  # no verdict about shapes that were never seen


def outside(location: str, *, offset: int = 0, length: int = 16, dims: tuple[int, ...] = (2, 2)) -> TensorProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
    return weight


def _hidden(weight: TensorProto) -> onnx.ModelProto:
    """A tensor in a graph within a node."""
    inner = helper.make_graph([], "inner", [], [], [weight])
    node = helper.make_node("If", ["input_ids"], ["hidden_states.0"], then_branch=inner, else_branch=inner)
    return small([node])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: small(weights=(outside("/etc/passwd"),)), "outside its folder"),
        (lambda: small(weights=(outside("../secret"),)), "outside its folder"),
        (lambda: small(weights=(outside("link"),)), "behind a link"),
        (lambda: small(weights=(outside("pipe"),)), "a pipe"),
        (lambda: small(weights=(outside("nothing"),)), "cannot be read"),
        (lambda: small(weights=(outside("data", length=1 << 40),)), "more data"),
        (lambda: small(weights=(outside("data", offset=-1),)), "more data"),
        (lambda: small(weights=(outside("data", dims=(1 << 30, 1 << 30)),)), "more data"),
        (lambda: small(weights=(outside("data", dims=(-2, -2)),)), "of the shape"),
        (lambda: _hidden(outside("/etc/passwd")), "outside its folder"),
    ],
)
def test_data_that_is_not_in_the_folder_is_refused(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], said: str
) -> None:
    from slipway_onnx_export.inspection.trial import read_graph

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(16))
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    (folder / "model.onnx").write_bytes(make().SerializeToString())
    with pytest.raises(ModelExportError) as caught:
        read_graph(folder / "model.onnx")
    assert caught.value.reason == "ONNX_INVALID"
    assert said in caught.value.message


def test_files_that_are_no_graph_end_with_a_reason(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path_factory.mktemp("home")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "[FILE_ERROR]" in in_process(capfd, "inspect", tmp_path / "pipe.onnx", home=home).err
    assert "[FILE_ERROR]" in in_process(capfd, "inspect", tmp_path / "nothing.onnx", home=home).err
    (tmp_path / "text.onnx").write_text("this is no graph")
    done = in_process(capfd, "inspect", tmp_path / "text.onnx", "--json", home=home)
    assert done.code == 3
    assert json.loads(done.out)["reason"] == "ONNX_INVALID"
    (tmp_path / CONTRACT).write_text("{}")
    assert "[CONTRACT_INVALID]" in in_process(capfd, "inspect", tmp_path / "text.onnx", home=home).err
