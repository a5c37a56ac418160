"""A router that is rounded below 16 bits fails by name, in every form of an output, whether the adapter trained it or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as ONNX
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.judging import survival
from slipway_validate.judging.distances import LIMITS
from support.models.current_kinds import Kind, expert_adapter, make_kind
from support.models.stored_survival import said, survival_of

WEIGHTS = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate"


def merged(kind: Kind, folder: Path) -> Path:
    folder.mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return MERGE.run(inputs, MergeParams(verify="spot"), Context(workdir=folder))["pytorch"]


def quantized(source: Path, folder: Path, **params: object) -> Path:
    folder.mkdir()
    return QUANTIZE.run({"model": source}, QuantizeParams(**params), Context(workdir=folder))["model"]  # type: ignore[arg-type]


def on_a_grid(values: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Round rows to integers of so many bits, with a scale for each 32 columns."""
    groups = values.float().unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / scales).round() * scales).flatten(-2).to(values.dtype)


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_router_on_the_grid_of_a_level_is_named(tmp_path: Path, *, trained: bool) -> None:
    kind = make_kind("qwen3.5-moe", tmp_path / "kind", dtype=torch.bfloat16)
    if not trained:
        kind = Kind(kind.name, kind.base, expert_adapter(kind, tmp_path / "experts"))
    right = merged(kind, tmp_path / "merged")
    outputs = {"pytorch": right, "pytorch-int4": quantized(right, tmp_path / "int4", format="pytorch", level="int4")}
    for bits in (8, 4):
        folder = outputs[f"pytorch-w{bits}"] = Path(shutil.copytree(outputs["pytorch-int4"], tmp_path / f"w{bits}"))
        tensors = load_file(folder / WEIGHTS)
        tensors[f"{ROUTER}.weight"] = on_a_grid(tensors[f"{ROUTER}.weight"], bits=bits)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    held = survival_of(kind.base, kind.adapter, outputs)
    assert {name: found.rounded_routers for name, found in held.items()} == {
        "pytorch": (),
        "pytorch-int4": (),
        "pytorch-w8": (ROUTER,),
        "pytorch-w4": (ROUTER,),
    }
    failed = [check.name for check in survival.checks(held["pytorch-w8"], LIMITS["int4"]) if not check.passed]
    assert failed == ["rounded_routers"]
    assert said(held["pytorch-w8"], "int4") == (
        f"the router {ROUTER}, which chooses the experts of each token, is rounded below 16 bits"
    )
    assert not said(held["pytorch-int4"], "int4")


def test_a_router_that_the_adapter_brings_whole_is_no_fault(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5-moe", tmp_path / "kind", dtype=torch.bfloat16)
    adapter = expert_adapter(kind, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["mlp.gate"]}))
    gates = {name: value for name, value in load_file(kind.base / WEIGHTS).items() if name.endswith("mlp.gate.weight")}
    brought = {f"base_model.model.{name}": value * 1.1 for name, value in gates.items()}
    assert brought
    save_file({**load_file(adapter / "adapter_model.safetensors"), **brought}, adapter / "adapter_model.safetensors")
    held = survival_of(
        kind.base, adapter, {"pytorch": merged(Kind(kind.name, kind.base, adapter), tmp_path / "merged")}
    )
    assert held["pytorch"].rounded_routers == ()


def test_a_model_without_experts_has_no_router(tmp_path: Path) -> None:
    kind = make_kind("granite4", tmp_path / "kind", dtype=torch.bfloat16)
    right = merged(kind, tmp_path / "merged")
    assert survival_of(kind.base, kind.adapter, {"pytorch": right})["pytorch"].rounded_routers == ()


@pytest.mark.slow
def test_a_router_in_the_codes_of_a_graph_is_named_unless_somebody_asked_for_it(tmp_path: Path) -> None:
    kind = make_kind("mixtral", tmp_path / "kind", dtype=torch.float32)
    (tmp_path / "onnx").mkdir()
    right = merged(kind, tmp_path / "merged")
    graph = ONNX.run({"pytorch": right}, OnnxExportParams(), Context(workdir=tmp_path / "onnx"))["onnx"]
    plain = quantized(graph, tmp_path / "int8", format="onnx", level="int8")
    asked = quantized(
        graph, tmp_path / "asked", format="onnx", level="int8", keep=("!mlp.gate",)
    )  # as the graph names it
    planted = Path(shutil.copytree(asked, tmp_path / "planted"))
    file = planted / "quantization.json"
    description = json.loads(file.read_text())
    assert description.pop("allowed")
    file.write_text(json.dumps(description))
    outputs = {"onnx": graph, "onnx-int8": plain, "onnx-asked": asked, "onnx-planted": planted}
    held = survival_of(kind.base, kind.adapter, outputs)
    for name in ("onnx", "onnx-int8", "onnx-asked"):
        assert held[name].rounded_routers == (), name
    assert [name.split(".")[2] for name in held["onnx-planted"].rounded_routers] == ["0", "1"]
    assert "and so is 1 other" in said(held["onnx-planted"], "int8")


@pytest.mark.slow
def test_a_router_in_the_blocks_of_llama_cpp_is_named(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install 'slipway-ml[gguf]'")
    from slipway_gguf.params import GGUFParams
    from slipway_gguf.stage import STAGE as GGUF
    from support.models.gguf_faults import faulty

    kind = make_kind("mixtral", tmp_path / "kind", dtype=torch.bfloat16)
    right = merged(kind, tmp_path / "merged")
    (tmp_path / "work").mkdir()
    good = GGUF.run({"pytorch": right}, GGUFParams(type="q8_0", name="tiny"), Context(workdir=tmp_path / "work"))[
        "gguf"
    ]

    def plant(tensors: dict[str, object]) -> None:
        name, kind_of_blocks = "blk.1.ffn_gate_inp.weight", gguf.GGMLQuantizationType.Q8_0
        blocks = gguf.quants.quantize(tensors[name], kind_of_blocks)
        tensors[name] = gguf.quants.dequantize(blocks, kind_of_blocks)

    bad = faulty(good, tmp_path / "bad", change=plant)
    held = survival_of(kind.base, kind.adapter, {"gguf-q8_0": good, "gguf-q6_k": bad})
    assert held["gguf-q8_0"].rounded_routers == ()
    assert [name.split(".")[2] for name in held["gguf-q6_k"].rounded_routers] == ["1"]
