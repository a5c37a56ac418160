"""Graphs that packaging makes go through the checks of an export, and a package that fails one is not delivered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slipway.stage import Context
from slipway_onnx_export.packaging import optimum, packages, transformers_js
from slipway_onnx_export.packaging.packages import write_packages
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, make_row

ALL = ("transformers_js", "optimum", "triton")
_LEGACY = {"engine": "legacy", "opset": 17}
_CHECKS = {"opset", "paths", "valid", "shapes", "interface", "stored once", "metadata", "loads", "parity"}


def again(folder: Path, tmp_path: Path, level: str = "") -> dict[str, Any]:
    """Write the packages of a folder again; return its record."""
    context = Context(workdir=tmp_path)
    write_packages(folder, level=level, ctx=context)
    record: dict[str, Any] = json.loads((folder / "onnx_export.json").read_text())
    return record | {"warnings": context.facts.get("warnings", [])}


def level_of(source: Path, level: str, workdir: Path) -> Path:
    from slipway_quantize.stage import STAGE

    workdir.mkdir()
    return STAGE.run({"model": source}, STAGE.params(format="onnx", level=level), Context(workdir=workdir))["model"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder with every package."""
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    root = tmp_path_factory.mktemp("pair")
    source = make_family_model("marian-two-vocabularies", root / "model")
    params = OnnxExportParams(packaging=ALL, parity="never", **_LEGACY)
    return STAGE.run({"pytorch": source}, params, Context(workdir=root))["onnx"]


@pytest.mark.parametrize(
    ("row", "params"),
    [
        ("Qwen3", {"past_present_share_buffer": True}),
        ("Qwen3", {"engine": "legacy", "opset": 17, "shapes": "static", "tracer_warnings": "prove"}),
        ("Qwen3", {**_LEGACY, "cache": False, "tracer_warnings": "prove"}),
        pytest.param("Whisper", _LEGACY, marks=pytest.mark.slow),
        pytest.param("Marian", {**_LEGACY, "cache": False}, marks=pytest.mark.slow),
        pytest.param("T5", {**_LEGACY, "shapes": "batch", "batch": 3}, marks=pytest.mark.slow),
        pytest.param("MiniLM, features", {**_LEGACY, "external_data": False}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)  # fmt: skip
def test_sound_packages_pass(tmp_path: Path, export: Callable[..., Exported], row: str, params: dict[str, Any]) -> None:
    source = make_row(next(each for each in ROWS if each.name == row), tmp_path / "model")
    exported = export(source, packaging=ALL, parity="auto", **params)
    record = json.loads((exported.folder / "onnx_export.json").read_text())
    refused = {kind for kind, result in record["packages"].items() if result.startswith("not packaged")}
    assert not any("check" in record["packages"][kind] for kind in refused)
    assert record["package_checks"] == {kind: dict.fromkeys(_CHECKS, "passed") for kind in ALL if kind not in refused}
    assert len(refused) < len(ALL)


@pytest.mark.parametrize("level", ["int4", pytest.param("fp16", marks=pytest.mark.slow)])
def test_packages_of_a_level_are_checked(pair: Path, tmp_path: Path, level: str) -> None:
    record = json.loads((level_of(pair, level, tmp_path / "level") / "onnx_export.json").read_text())
    assert record["package_checks"] == {kind: dict.fromkeys(_CHECKS, "passed") for kind in ALL}


def _swap_branches(model: ir.Model) -> ir.Model:
    node = next(node for node in model.graph if node.op_type == "If")
    branches = node.attributes["then_branch"].as_graph(), node.attributes["else_branch"].as_graph()
    for name, graph in zip(("else_branch", "then_branch"), branches, strict=True):
        node.attributes[name] = ir.AttrGraph(name, graph)
    return model


def _forget_the_mask(model: ir.Model) -> ir.Model:
    mask = next(value for value in model.graph.inputs if value.name == "encoder_attention_mask")
    users = list(mask.uses())
    true = ir.node("Equal", [mask, mask])
    all_of_it = ir.node("Cast", [true.outputs[0]], {"to": int(ir.DataType.INT64)})
    model.graph.insert_before(model.graph[0], [true, all_of_it])
    for use in users:
        use.node.replace_input_with(use.idx, all_of_it.outputs[0])
    return model


def _do_not_read_the_branch(model: ir.Model) -> ir.Model:
    node = next(node for node in model.graph if node.op_type == "If")
    true = ir.Value(name="true", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.BOOL))
    true.const_value = ir.tensor(np.array([True]), name="true")
    model.graph.register_initializer(true)
    node.replace_input_with(0, true)
    return model


def _wrong_operator(model: ir.Model) -> ir.Model:
    next(node for node in model.graph if node.op_type == "Add").op_type = "Addition"
    return model


def _without_metadata(model: ir.Model) -> ir.Model:
    model.metadata_props.clear()
    return model


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_swap_branches, "parity"),
        (_forget_the_mask, "parity"),
        (_do_not_read_the_branch, "interface"),
        (_wrong_operator, "valid"),
        (_without_metadata, "metadata"),
    ],
)
def test_a_fault_of_a_merged_decoder_is_found(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[ir.Model], ir.Model], check: str
) -> None:
    merge = transformers_js.merge_decoder
    monkeypatch.setattr(transformers_js, "merge_decoder", lambda folder: damage(merge(folder)))
    record = again(pair, tmp_path)
    assert record["packages"]["transformers_js"].startswith(f"not packaged: check '{check}': ")
    assert "transformers_js" in record["warnings"][0]
    assert not (pair / "transformers_js").exists()
    assert record["package_checks"].keys() == {"optimum", "triton"}


def test_a_fault_of_a_first_decoder_is_found(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = optimum.first_decoder
    monkeypatch.setattr(optimum, "first_decoder", lambda folder: _forget_the_mask(make(folder)))
    found = again(pair, tmp_path)["packages"]["optimum"]
    assert found.startswith(
        "not packaged: check 'parity': 'logits' of decoder_model.onnx differs from that of decoder_model.onnx by "
    )


def test_weights_at_other_places_are_found(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of the copy are those of the folder's graph."""
    save = packages.save_copy

    def save_others(model: ir.Model, target: Path, *, own: str) -> int:
        alike: dict[tuple[int, ...], ir.Value] = {}
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            first = alike.setdefault(tuple(tensor.shape.numpy()), value)
            if first is not value:
                first.const_value, value.const_value = value.const_value, first.const_value
        return save(model, target, own=own)

    monkeypatch.setattr(packages, "save_copy", save_others)
    assert again(pair, tmp_path)["packages"]["triton"].startswith("not packaged: check 'parity': ")


def test_a_fault_at_a_level_is_a_warning_of_that_level(
    export: Callable[..., Exported], family: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = level_of(export(family("qwen3-tied"), packaging=("transformers_js",)).folder, "int4", tmp_path / "level")
    expand = transformers_js.expand_quantized_lookups

    def shift(model: ir.Model) -> None:
        expand(model)
        (name,) = (name for name in model.graph.initializers if name.endswith("/zero_point"))
        model.graph.initializers[name].const_value = ir.tensor(np.array(7.0, np.float32), name=name)

    monkeypatch.setattr(transformers_js, "expand_quantized_lookups", shift)
    found = again(folder, tmp_path, level="int4")
    assert found["packages"]["transformers_js"].startswith("not packaged: check 'parity': ")
    assert "package_checks" not in found
    assert found["warnings"][0].startswith("the ONNX model has no transformers_js package at int4: check 'parity': ")


def test_weights_beyond_the_memory_are_not_compared(
    export: Callable[..., Exported], family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = export(family("qwen3-tied"), packaging=("optimum", "triton")).folder
    context = Context(workdir=tmp_path, max_memory_bytes=1000)
    write_packages(folder, level="", ctx=context)
    checks = json.loads((folder / "onnx_export.json").read_text())["package_checks"]
    assert checks["optimum"]["parity"].startswith("not run: ")
    assert checks["optimum"]["loads"] == "passed"
    assert checks["triton"]["parity"] == "passed"  # it is a copy, so that nothing is computed


def test_packaging_needs_no_pytorch() -> None:
    """The quantize stage packages each level of a graph."""
    code = "import slipway_onnx_export.packaging.packages, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
