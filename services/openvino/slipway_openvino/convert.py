"""The work of the stage: read the ONNX graph, give it a state, write the IR, and complete the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from slipway.errors import CheckpointValidationError, OpenVinoExportError
from slipway.models.base_format import read_config
from slipway.models.families import DECODER, Family, described, family_of
from slipway.models.model_files import copy_companions
from slipway.stage import Context, installed_version
from slipway_openvino.attention import simplify_attention
from slipway_openvino.families import refusal_reason
from slipway_openvino.integers import sign_integers
from slipway_openvino.library import ov, said
from slipway_openvino.lookups import GRAPH, readable_graph
from slipway_openvino.names import number_nodes
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.state import PAST, PRESENT, make_stateful
from slipway_openvino.tokenizers import write_tokenizer

MODEL = "openvino_model.xml"
RECORD = "openvino_export.json"
_QUANTIZATION = "quantization.json"
_LIBRARIES = ("openvino", "openvino-tokenizers")


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
    _check_interface(model, family)
    integers = sign_integers(model, work)
    if family is DECODER:
        make_stateful(model)
    simplify_attention(model)
    number_nodes(model)
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
    del model, integers
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
        readable = readable_graph(source, work)
    except (DecodeError, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise OpenVinoExportError(
            f"{graph.name} is no ONNX graph ({error})",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": graph.name},
        ) from error
    try:
        return ov.Core().read_model(readable)
    except RuntimeError as error:  # all that the library raises
        raise OpenVinoExportError(
            f"OpenVINO {installed_version('openvino')} cannot read {graph.name}: {said(error)}",
            remedy="leave the OpenVINO format out for this model, or use another version of openvino",
            about={"file": graph.name},
        ) from error


def _check_interface(model: ov.Model, family: Family) -> None:
    """Refuse a graph without the inputs and outputs of its family."""
    inputs = {name for port in model.inputs for name in port.names}
    outputs = {name for port in model.outputs for name in port.names}
    past = {name for name in inputs if name.startswith(PAST)} if family is DECODER else set()
    present = {PRESENT + name.removeprefix(PAST) for name in past}
    missing = sorted(({"input_ids"} - inputs) | ({*family.outputs, *present} - outputs))
    own = {"position_ids"} if family is DECODER else {"token_type_ids"}  # what runtime.py feeds
    unknown = sorted(inputs - past - {"input_ids", "attention_mask"} - own)
    strange = sorted(port.any_name for port in model.inputs if not _has_right_axes(port))
    if missing or unknown or strange:
        raise OpenVinoExportError(
            f"the graph is not that of a {family.name}: missing {missing[:3]}, unknown {unknown[:3]}, of another shape {strange[:3]}",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote, with a cache and shapes that vary",
            about={"file": GRAPH},
        )


def _has_right_axes(port: ov.Output) -> bool:
    """Return whether an input takes any batch and any length; heads and head size of a cache are fixed."""
    shape = port.get_partial_shape()
    varying = () if shape.rank.is_dynamic else tuple(shape[axis].is_dynamic for axis in range(len(shape)))
    return varying in ((True, True), (True, False, True, False))
