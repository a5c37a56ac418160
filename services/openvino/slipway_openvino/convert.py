"""The work of the stage: read the ONNX graph, give it a state, write the IR, and complete the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openvino as ov

from slipway.errors import CheckpointValidationError, OpenVinoExportError
from slipway.files.json_documents import read_json_object
from slipway.models.base_format import read_config
from slipway.models.families import DECODER, Family, described, family_of
from slipway.models.model_files import copy_companions
from slipway.stage import Context, installed_version
from slipway_openvino.attention import simplify_attention
from slipway_openvino.families import refusal_reason
from slipway_openvino.lookups import GRAPH, readable_graph
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.state import make_stateful
from slipway_openvino.tokenizers import write_tokenizer

MODEL = "openvino_model.xml"
RECORD = "openvino_export.json"
_QUANTIZATION = "quantization.json"
_LIBRARIES = ("openvino", "openvino-tokenizers")
_SHOWN = 600


def convert_folder(source: Path, target: Path, params: OpenVinoParams, ctx: Context) -> None:
    """Convert the graph in ``source`` into the empty folder ``target``.

    Raises:
        OpenVinoExportError: With the reasons the package's README lists.
    """
    family = _family(source)
    ctx.progress("read", done=0, total=1, unit="graphs")
    work = ctx.workdir / "graph"
    work.mkdir()
    model = _read(source, work)
    if family is DECODER:
        make_stateful(model)
    simplify_attention(model)
    _check_interface(model, family)
    ctx.progress("write", done=0, total=1, unit="graphs")
    ov.save_model(model, target / MODEL, compress_to_fp16=params.level == "fp16")
    facts: dict[str, Any] = {
        "precision": params.level or "fp32",
        "family": family.name,
        "stateful": family is DECODER,
        "inputs": [port.any_name for port in model.inputs],
        "outputs": [port.any_name for port in model.outputs],
        "versions": {name: installed_version(name) for name in _LIBRARIES},
    }
    del model
    copy_companions(source, target)
    if (source / _QUANTIZATION).is_file():
        shutil.copyfile(source / _QUANTIZATION, target / _QUANTIZATION)
    ctx.progress("tokenizer", done=0, total=1, unit="tokenizers")
    if params.tokenizer:
        facts["tokenizer"] = write_tokenizer(target, ctx)
    (target / RECORD).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in (target / MODEL, (target / MODEL).with_suffix(".bin")))
    ctx.record(**facts, size_after_bytes=size)


def _family(source: Path) -> Family:
    try:
        config = read_config(source)
    except CheckpointValidationError as error:
        raise OpenVinoExportError(
            error.message,
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": "config.json"},
        ) from error
    family, why = family_of(config), refusal_reason(config)
    if why or family is None:
        raise OpenVinoExportError(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the OpenVINO format out for this model",
            about={"family": described(config)},
        )
    return family


def _read(source: Path, work: Path) -> ov.Model:
    """Read a graph; its weights stay mapped from their file."""
    graph = source / GRAPH
    if not graph.is_file():
        raise OpenVinoExportError(
            f"the folder has no {graph.name}",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": graph.name},
        )
    try:
        return ov.Core().read_model(readable_graph(source, work))
    except RuntimeError as error:  # all that the library raises
        raise OpenVinoExportError(
            f"OpenVINO {installed_version('openvino')} cannot read {graph.name}: {_shortened(error)}",
            remedy="leave the OpenVINO format out for this model, or use another version of openvino",
            about={"file": graph.name},
        ) from error


def _shortened(error: RuntimeError) -> str:
    """Return the lines of an error of the library that name no file of its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and ".cpp:" not in line)
    return text[:_SHOWN]


def _check_interface(model: ov.Model, family: Family) -> None:
    """Refuse a graph without the inputs and outputs of its family."""
    inputs = {name for port in model.inputs for name in port.names}
    outputs = {name for port in model.outputs for name in port.names}
    known = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "beam_idx"}
    missing = sorted(({"input_ids"} - inputs) | (set(family.outputs) - outputs))
    unknown = sorted(port.any_name for port in model.inputs if not port.names & known)
    if missing or unknown:
        raise OpenVinoExportError(
            f"the graph is not that of a {family.name}: missing {missing[:3]}, unknown {unknown[:3]}",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote, with a cache and shapes that vary",
            about={"file": GRAPH},
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Return what :func:`convert_folder` wrote about a folder; empty if there is no such file."""
    try:
        return read_json_object(folder / RECORD, lenient=True)
    except (OSError, ValueError):
        return {}
