"""The work of the stage: read the ONNX graph, give it a state, write the IR, and complete the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from slipway.distribution import installed_version
from slipway.errors import CheckpointValidationError, OpenVinoExportError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, Family
from slipway.model.model_files import copy_companions
from slipway.stage import Context
from slipway_openvino.graphs.lookups import readable_graph
from slipway_openvino.graphs.merging import drop_idle_conversions, merge_equal_nodes
from slipway_openvino.graphs.passes import number_nodes, sign_integers, simplify_attention, spread_over_experts
from slipway_openvino.graphs.reshapes import settle_reshapes
from slipway_openvino.graphs.state import (
    attend_to_encoded,
    drop_cross_attention,
    make_stateful,
    pair_interfaces,
    text_interface,
)
from slipway_openvino.library import error_summary, ov
from slipway_openvino.params import (
    DECODER_GRAPH,
    DECODER_MODEL,
    ENCODER_GRAPH,
    ENCODER_MODEL,
    GRAPH,
    MODEL,
    PAIRS,
    OpenVinoParams,
    refusal_reason,
)
from slipway_openvino.tokenizers import write_tokenizer
from slipway_openvino.writing import save_model

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
    models = _encoder_and_decoder(source, family, ctx) if family in PAIRS else _one_model(source, family, ctx)
    facts: dict[str, Any] = {
        "precision": params.level or "fp32",
        "family": family.name,
        "versions": {name: installed_version(name) for name in _LIBRARIES},
    }
    described = {}
    for done, (file, model) in enumerate(models.items()):
        ctx.progress("write", done=done, total=len(models), unit="graphs")
        work = ctx.workdir / f"integers-{done}"
        work.mkdir()
        integers = sign_integers(model, work)
        simplify_attention(model)
        spread_over_experts(model)
        drop_idle_conversions(model)
        settle_reshapes(model)
        merge_equal_nodes(model)
        number_nodes(model)
        save_model(model, target / file, halves=params.level == "fp16")
        described[file] = {
            "stateful": bool(model.get_variables()),
            "inputs": [port.any_name for port in model.inputs],
            "outputs": [port.any_name for port in model.outputs],
        }
        del integers
    facts |= described.get(MODEL, {"models": described})
    files = [target / name for file in models for name in (file, Path(file).with_suffix(".bin").name)]
    del models, model
    copy_companions(source, target)
    if (source / _QUANTIZATION).is_file():
        shutil.copyfile(source / _QUANTIZATION, target / _QUANTIZATION)
    ctx.progress("tokenizer", done=0, total=1, unit="tokenizers")
    if (
        params.tokenizer and family is not ENCODER_DECODER
    ):  # openvino-genai runs no translators, which have two vocabularies
        facts["tokenizer"] = write_tokenizer(target, ctx)
    (target / RECORD).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    ctx.record(**facts, size_after_bytes=sum(path.stat().st_size for path in files))


def _one_model(source: Path, family: Family, ctx: Context) -> dict[str, ov.Model]:
    """Return the model of a graph, by its file name. A decoder becomes stateful."""
    model = _read(source / GRAPH, ctx)
    text_interface(model, family).check(model, GRAPH)
    if family is DECODER:
        make_stateful(model)
    return {MODEL: model}


def _encoder_and_decoder(source: Path, family: Family, ctx: Context) -> dict[str, ov.Model]:
    """Return an encoder and a decoder, by their file names. The decoder becomes stateful."""
    encoder, decoder = (_read(source / name, ctx) for name in (ENCODER_GRAPH, DECODER_GRAPH))
    of_encoder, of_decoder = pair_interfaces(decoder, family)
    of_encoder.check(encoder, ENCODER_GRAPH)
    of_decoder.check(decoder, DECODER_GRAPH)
    make_stateful(decoder)
    try:
        decoder = attend_to_encoded(decoder, encoder.clone())  # both models keep a part of it, with the same weights
        return {ENCODER_MODEL: drop_cross_attention(encoder), DECODER_MODEL: decoder}
    except RuntimeError as error:  # the library raises nothing else
        raise OpenVinoExportError(
            f"keys and values of the source do not follow from what {ENCODER_GRAPH} returns: {error_summary(error)}",
            remedy="give the folder that onnx_export wrote, or leave the OpenVINO format out for this model",
            about={"file": ENCODER_GRAPH},
        ) from error


def _family(source: Path) -> Family:
    try:
        config = ModelConfig.read(source)
    except CheckpointValidationError as error:
        raise OpenVinoExportError(
            error.message,
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": "config.json"},
        ) from error
    family, why = config.family, refusal_reason(config)
    if why or family is None:
        raise OpenVinoExportError(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the OpenVINO format out for this model",
            about={"family": config.description},
        )
    return family


def _read(graph: Path, ctx: Context) -> ov.Model:
    """Read a graph; its weights stay mapped from their file."""
    if not graph.is_file():
        raise OpenVinoExportError(
            f"the folder has no {graph.name}",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": graph.name},
        )
    work = ctx.workdir / graph.stem
    work.mkdir()
    try:
        readable = readable_graph(graph, work)
    except (DecodeError, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise OpenVinoExportError(
            f"{graph.name} is no ONNX graph ({error})",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export wrote",
            about={"file": graph.name},
        ) from error
    try:
        return ov.Core().read_model(readable)
    except RuntimeError as error:  # the library raises nothing else
        raise OpenVinoExportError(
            f"OpenVINO {installed_version('openvino')} cannot read {graph.name}: {error_summary(error)}",
            remedy="leave the OpenVINO format out for this model, or use another version of openvino",
            about={"file": graph.name},
        ) from error
