"""An encoder and a decoder that share weights: each is stored once at every level, and both graphs run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from support.models.family_models import make_family_model

Quantize = Callable[..., tuple[Path, Context]]
LEVELS = ("fp16", "int8", "int8_dynamic", "int4")
ROWS, WIDTH = 96, 64
TABLE = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(np.float32)
BIAS = np.linspace(-0.5, 0.5, WIDTH, dtype=np.float32)


def places(folder: Path, name: str) -> dict[str, tuple[str, int]]:
    """File and offset of each external tensor of a graph."""
    found = {}
    for tensor in onnx.load(folder / name, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = entries["location"], int(entries.get("offset", 0))
    return found


def data_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.onnx.data"))


def run(folder: Path, name: str, ids: Any) -> Any:
    import onnxruntime

    graph = onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
    return graph.run(None, {"input_ids": ids})[0].astype(np.float32)


def stored(name: str, array: Any, *, offset: int) -> TensorProto:
    """A tensor in the encoder's data file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    place = {"location": "encoder_model.onnx.data", "offset": str(offset), "length": str(array.nbytes)}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder whose graphs look up the same table, which the decoder multiplies with too, as tied heads do, and add the same bias."""
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "encoder_model.onnx.data").write_bytes(TABLE.tobytes() + BIAS.tobytes())
    (folder / "decoder_model.onnx.data").write_bytes(b"")
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    for name, width in (("encoder_model.onnx", WIDTH), ("decoder_model.onnx", ROWS)):
        shared = [stored("shared.weight", TABLE, offset=0), stored("shared.bias", BIAS, offset=TABLE.nbytes)]
        nodes = [
            helper.make_node("Gather", ["shared.weight", "input_ids"], ["row"]),
            helper.make_node("Add", ["row", "shared.bias"], ["found"]),
        ]
        if name == "decoder_model.onnx":
            nodes += [
                helper.make_node("Transpose", ["shared.weight"], ["turned"], perm=[1, 0]),
                helper.make_node("MatMul", ["found", "turned"], ["out"]),
            ]
        out = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["batch", "sequence", width])
        graph = helper.make_graph(nodes, "g", [ids], [out], shared)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / name)
    return folder


@pytest.mark.parametrize(("level", "bits"), [("fp16", 16), ("int8", 9), ("int8_dynamic", 9), ("int4", 5)])
def test_what_both_graphs_share_is_stored_once(quantize: Quantize, pair: Path, level: str, bits: int) -> None:
    output, _ = quantize(pair, format="onnx", level=level, check=False)
    encoder, decoder = (places(output, f"{part}_model.onnx") for part in ("encoder", "decoder"))
    assert set(encoder.values()) == set(decoder.values())
    assert len({file for file, _ in decoder.values()}) == 1
    assert ("shared.bias" in encoder) == (level != "fp16"), (
        "what is not rounded is copied once; fp16 has it in each graph"
    )
    assert data_bytes(output) <= TABLE.size * bits / 8 + 4096  # scales are 1 bit a weight
    ids = np.array([[3, 1, 95], [0, 7, 7]])
    looked_up = run(output, "encoder_model.onnx", ids)
    assert (
        np.abs(looked_up - TABLE[ids] - BIAS).max()
        < {"fp16": 2e-3, "int8": 2e-2, "int8_dynamic": 2e-2, "int4": 0.3}[level]
    )
    found = run(output, "decoder_model.onnx", ids)
    assert (
        np.abs(found - looked_up @ TABLE.T).max() < {"fp16": 0.05, "int8": 0.4, "int8_dynamic": 0.6, "int4": 5}[level]
    )


def test_a_table_of_both_graphs_is_in_each_that_has_one_file(quantize: Quantize, pair: Path) -> None:
    output, _ = quantize(pair, format="onnx", level="int4", check=False, external_data=False)
    assert not list(output.glob("*.data"))
    ids = np.array([[3, 1, 95], [0, 7, 7]])
    looked_up = run(output, "encoder_model.onnx", ids)
    assert np.abs(looked_up - TABLE[ids] - BIAS).max() < 0.3
    assert np.abs(run(output, "decoder_model.onnx", ids) - looked_up @ TABLE.T).max() < 5


@pytest.mark.slow
def test_a_translator_gets_smaller_and_shares_what_it_shared(quantize: Quantize, tmp_path: Path) -> None:
    work = tmp_path / "export"
    work.mkdir()
    source = make_family_model("t5", tmp_path / "model")
    exported = EXPORT.run({"pytorch": source}, OnnxExportParams(parity="never"), Context(workdir=work))["onnx"]
    shared = shared_places(exported)
    assert shared
    sizes = [data_bytes(exported)]
    for level in LEVELS:
        output, ctx = quantize(exported, format="onnx", level=level)
        assert ctx.facts["check"] == "passed"
        assert len(shared_places(output)) >= len(shared)
        sizes.append(data_bytes(output))
    assert sizes == sorted(sizes, reverse=True)


def shared_places(folder: Path) -> set[tuple[str, int]]:
    encoder, decoder = (places(folder, f"{part}_model.onnx") for part in ("encoder", "decoder"))
    return set(encoder.values()) & set(decoder.values())


@pytest.mark.parametrize("level", ["fp16", "int8_dynamic", "int8"])
def test_weights_that_share_one_place_share_one_tensor(quantize: Quantize, pair: Path, level: str) -> None:
    """An export stores equal weights once, under each of their names."""
    (pair / "decoder_model.onnx").unlink()
    model = onnx.load(pair / "encoder_model.onnx", load_external_data=False)
    again = TensorProto()
    again.CopyFrom(model.graph.initializer[0])
    again.name = "other.weight"
    model.graph.initializer.append(again)
    model.graph.node.append(helper.make_node("MatMul", ["found", "turned"], ["out"]))
    model.graph.node.insert(0, helper.make_node("Transpose", ["other.weight"], ["turned"], perm=[1, 0]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", "sequence", ROWS]))
    onnx.save(model, pair / "encoder_model.onnx")
    output, _ = quantize(pair, format="onnx", level=level, check=False)
    ids = np.array([[3, 1, 95]])
    assert np.abs(run(output, "encoder_model.onnx", ids) - (TABLE[ids] + BIAS) @ TABLE.T).max() < 0.8
    assert data_bytes(output) < TABLE.size * (17 if level == "fp16" else 10) / 8 + 4096
