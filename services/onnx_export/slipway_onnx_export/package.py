"""Write the files beside the model in the output folder, so that it can be used on its own."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipway.models.model_files import copy_companions
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.source import ModelSource

LIBRARIES = ("mobius-onnx", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers")


def complete_folder(folder: Path, *, source: ModelSource, params: OnnxExportParams, facts: dict[str, Any]) -> None:
    """Add configuration, tokenizer, usage example and ``onnx_export.json`` to the exported model."""
    copy_companions(source.folder, folder)
    shutil.copyfile(Path(__file__).with_name("example.py"), folder / "example.py")
    record = {
        **facts,
        "model_type": source.config.model_type,
        "dynamic_axes": params.dynamic_axes,
        "optimize_graph": params.optimize_graph,
        "versions": {name: version(name) for name in LIBRARIES},
    }
    text = json.dumps(record, indent=2, sort_keys=True)
    (folder / "onnx_export.json").write_text(text + "\n", encoding="utf-8")
