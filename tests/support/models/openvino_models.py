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

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.stage import STAGE
from slipway_quantize.stage import STAGE as QUANTIZE

LEVELS = {"openvino": "", "openvino-fp16": "fp16", "openvino-int8": "int8", "openvino-int4": "int4"}
"""Level of each output of the format."""
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
