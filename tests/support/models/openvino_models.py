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
