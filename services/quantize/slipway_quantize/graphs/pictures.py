"""Copy the graph that makes features of pictures: levels round the text part, and the encoder keeps its type."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from slipway.model.graphs.pictures import VISION_ENCODER
from slipway_quantize.graphs.folder import DataFile, Shared, copy_external, load_graph, save_graph
from slipway_quantize.report import Outcome

ENCODER_KEPT = "float32, because it reads pictures: levels round what reads text"


def copy_encoder(source: Path, target: Path, outcome: Outcome, *, level: str) -> None:
    """Copy the encoder of pictures, if there is one. At fp16, it gives its features as the embedding takes them.

    Args:
        source: The folder that was quantized.
        target: The result.
        outcome: Gets a note.
        level: The level of the result.
    """
    if not (source / VISION_ENCODER).is_file():
        return
    model = load_graph(source, VISION_ENCODER)
    if level == "fp16":
        _cast_features(model.graph)
    with DataFile(target, VISION_ENCODER, Shared()) as data:
        copy_external(source, model, data)
    save_graph(model, target, VISION_ENCODER)
    outcome.details[VISION_ENCODER] = ENCODER_KEPT


def _cast_features(graph: ir.Graph) -> None:
    """Return features in float16 under their names, in place."""
    for index, value in enumerate(graph.outputs):
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT16)})
        made, name = cast.outputs[0], value.name
        made.shape, made.type = value.shape, ir.TensorType(ir.DataType.FLOAT16)
        value.name, made.name = f"{name}.float32", name
        graph.append(cast)
        graph.outputs[index] = made
