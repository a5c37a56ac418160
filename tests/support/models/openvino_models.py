"""Small models as OpenVINO folders: the graph that the format asks for, and the stage run on it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.stage import STAGE


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
