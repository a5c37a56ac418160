"""Small models as OpenVINO folders: the graph that the format asks for, the stage run on it, and IRs with constants changed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.stage import STAGE
from slipway_quantize.stage import STAGE as QUANTIZE

LEVELS = {"openvino": "", "openvino-fp16": "fp16", "openvino-int8": "int8", "openvino-int4": "int4"}
"""Level of each output of the format."""
ROWS, SIZE = 64, 32
"""Of a tied table: its rows, and the columns of a group."""
_TYPES = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i4": np.uint8}


def exported(source: Path, work: Path, **params: Any) -> Path:
    """Return the folder with the graph that the format asks for."""
    asked = OnnxExportParams(optimization="basic", **{"parity": "never", **params})
    work.mkdir(parents=True, exist_ok=True)
    return EXPORT.run({"pytorch": source}, asked, Context(workdir=work))["onnx"]


def converted(source: Path, work: Path, **params: Any) -> tuple[Path, Context]:
    """Run the stage on the folder of a graph."""
    work.mkdir(parents=True, exist_ok=True)
    ctx = Context(workdir=work, log=logging.getLogger("test"))
    return STAGE.run({"onnx": source}, OpenVinoParams(**params), ctx)["openvino"], ctx


def rounded(graph: Path, work: Path, level: str) -> Path:
    """Return the graph whose weights the quantize stage has rounded, in groups of 16 columns."""
    work.mkdir(parents=True, exist_ok=True)
    asked = QUANTIZE.params(format="onnx", level=level, group_size=16, accuracy_level=1, check=False)
    return QUANTIZE.run({"model": graph}, asked, Context(workdir=work))["model"]


def every_level(graph: Path, work: Path) -> dict[str, Path]:
    """Return the folders of all outputs that are made of a graph, by name."""
    found = {}
    for name, level in LEVELS.items():
        chosen = rounded(graph, work / f"quantize-{level}", level) if level.startswith("int") else graph
        found[name] = converted(chosen, work / name, level=level, tokenizer=False)[0]
    return found


def tied_graph(path: Path, *, bits: int, groups: int, zeros: bool, seed: int = 0, data: str = "data") -> np.ndarray:
    """Write a graph as the quantize stage does, whose rows are looked up and multiplied; return its weights (rows, columns)."""
    random = np.random.default_rng(seed)
    packed_codes = random.integers(0, 256, (ROWS, groups, SIZE * bits // 8), dtype=np.uint8)
    scales = random.random((ROWS, groups), dtype=np.float32).astype(np.float16).astype(np.float32)
    points = random.integers(0, 2**bits, (ROWS, groups), dtype=np.uint8)
    even = np.pad(points, ((0, 0), (0, groups % 2)))
    packed = points if bits == 8 else even[:, 0::2] | (even[:, 1::2] << 4)
    columns = groups * SIZE
    stored = {
        data: packed_codes,
        "scale": scales,
        "shape": np.array([ROWS, groups, 1]),
        "whole": np.array([0, 0, columns]),
    }
    stored |= {"point": points[:, :, None], "packed": packed} if zeros else {}
    shared, row_zero, zero = {"bits": bits, "block_size": SIZE}, ["point"] * zeros, ["packed"] * zeros
    nodes = [
        helper.make_node("Reshape", ["scale", "shape"], ["row_scale"]),
        helper.make_node("GatherBlockQuantized", [data, "ids", "row_scale", *row_zero], ["groups"], domain="com.microsoft", gather_axis=0, quantize_axis=2, **shared),
        helper.make_node("Reshape", ["groups", "whole"], ["rows"]),
        helper.make_node("MatMulNBits", ["rows", data, "scale", *zero], ["out"], domain="com.microsoft", K=columns, N=ROWS, **shared),
    ]  # fmt: skip
    save_graph(path, nodes, ["a", "b"], ["out"], stored)
    codes = (
        packed_codes if bits == 8 else np.stack([packed_codes & 15, packed_codes >> 4], -1).reshape(ROWS, groups, SIZE)
    )
    middle = points[:, :, None] if zeros else 2 ** (bits - 1)
    return ((codes.astype(np.float32) - middle) * scales[:, :, None]).reshape(ROWS, columns)


def save_graph(path: Path, nodes: list[Any], ids: list[Any], outputs: list[str], stored: dict[str, np.ndarray]) -> None:
    given = [helper.make_tensor_value_info("ids", TensorProto.INT64, ids)]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    constants = [numpy_helper.from_array(values, name) for name, values in stored.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@dataclass(frozen=True)
class Constant:
    """A constant of an IR: its values lie in the ``.bin``, and may be written to."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Ir:
    """A copy of the IR of a folder, for changes."""

    def __init__(self, source: Path, folder: Path, file: str = "openvino_model.xml") -> None:
        self.folder = Path(shutil.copytree(source, folder))
        self.path = self.folder / file
        self.weights = self.path.with_suffix(".bin")
        root = ET.fromstring(self.path.read_text())
        layers, edges = root.find("layers"), root.find("edges")
        assert layers is not None
        assert edges is not None
        self._layers = {layer.attrib["id"]: layer for layer in layers}
        self._edges = [(edge.attrib["from-layer"], edge.attrib["to-layer"]) for edge in edges]

    def constant(self, name: str) -> Constant:
        """Return the constant of a name."""
        (layer,) = (each for each in self._layers.values() if each.attrib["name"] == name)
        return _constant(layer)

    def scale(self, name: str) -> Constant:
        """Return the scales of the integers of a name."""
        (number,) = (number for number, each in self._layers.items() if each.attrib["name"] == name)
        (wide,) = (target for source, target in self._edges if source == number)
        (product,) = (target for source, target in self._edges if source == wide)
        assert self._layers[product].attrib["type"] == "Multiply"
        (scale,) = (source for source, target in self._edges if target == product and source != wide)
        return _constant(self._layers[scale])

    def change(self, constant: Constant, change: Callable[[np.ndarray], None]) -> Ir:
        """Change the values of a constant in place; integers of 4 bits as bytes."""
        shape = constant.shape if constant.kind != "i4" else (constant.size,)
        values = np.memmap(self.weights, _TYPES[constant.kind], "r+", offset=constant.offset, shape=shape)
        change(values)
        values.flush()
        return self

    def replace(self, old: str, new: str) -> Ir:
        """Change the description."""
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new, 1))
        return self


def _constant(layer: ET.Element) -> Constant:
    data = layer.find("data")
    assert data is not None
    shape = tuple(int(size) for size in data.attrib["shape"].split(",") if size)
    return Constant(
        layer.attrib["name"],
        data.attrib["element_type"],
        shape,
        int(data.attrib["offset"]),
        int(data.attrib["size"]),
    )


def held_types(model: Path) -> dict[str, set[str]]:
    """Return the types in which the plugin holds weights of products and tables of lookups, by kind of layer; without small constants."""
    from slipway_openvino.library import ov

    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})
    found: dict[str, set[str]] = {"FullyConnected": set(), "Gather": set()}
    for node in compiled.get_runtime_model().get_ordered_ops():
        kind = _said(node, "layerType")
        if kind not in found:
            continue
        held = node.input_value(int(kind == "FullyConnected")).get_node()
        shape = held.get_output_partial_shape(0)
        if _said(held, "layerType") == "Const" and shape.is_static and len(shape) > 1:
            found[kind].add(_said(held, "outputPrecisions"))
    return found


def _said(node: Any, name: str) -> str:
    return str(node.get_rt_info()[name].astype(str))
