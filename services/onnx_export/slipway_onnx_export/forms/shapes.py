"""Fixed sizes of axes, for graphs whose shapes do not vary."""

from __future__ import annotations

from collections.abc import Mapping

from slipway.errors import ONNXExportError
from slipway.model.config.lengths import position_thresholds
from slipway.model.families import DECODER, ENCODER_DECODER, SPEECH
from slipway.model.generation import token_of
from slipway_onnx_export.names import BATCH, PAST, SEQUENCE, SOURCE, TOTAL
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.source import ModelSource

STATIC_TOKENS = 256
"""Tokens that a static graph has room for, unless parameters or the model say otherwise."""


def fixed_sizes(source: ModelSource, params: OnnxExportParams) -> dict[str, int]:
    """Return the fixed size of each axis that does not vary, by name.

    Raises:
        ONNXExportError: ``SHAPES_UNSUPPORTED`` if a static graph of the model would compute something else, or if the model has no
            room for the sizes.
    """
    if params.shapes == "dynamic":
        return {}
    if params.shapes == "batch":
        return {BATCH: params.batch}
    caches = source.family is DECODER and params.cache
    if params.cache and source.family in (ENCODER_DECODER, SPEECH):
        raise _unsupported_error(
            source, "a decoder with an encoder counts positions by the length of its cache, which a static graph fixes",
            "set cache to false, or shapes to batch",
        )  # fmt: skip
    if caches and source.sliding_window:
        raise _unsupported_error(
            source, f"its attention window of {source.sliding_window} tokens would count unused places of a static cache",
            "set cache to false, or shapes to batch",
        )  # fmt: skip
    room, changes = room_of(source), position_thresholds(source.text_config)
    if changes and changes[0] < room:
        room = changes[0]
    sequence = params.sequence or (1 if caches else min(STATIC_TOKENS, room))
    past = (params.past or max(min(STATIC_TOKENS, room) - sequence, 1)) if caches else 0
    if sequence + past > room:
        what = f"sequence {sequence} and past {past}" if past else f"sequence {sequence}"
        why = f"it has room for {room} tokens"
        if changes[:1] == (room,):
            # A text is cut into calls of a fixed length, and cached keys keep the rotation of their call.
            why = f"beyond {room} tokens its positions count otherwise, which calls of a fixed length would mix"
        raise _unsupported_error(
            source, f"{why}, and {what} need more", "set smaller sizes, or shapes to batch or dynamic"
        )
    return {BATCH: params.batch, SEQUENCE: sequence, SOURCE: sequence, PAST: past, TOTAL: sequence + past}


def room_of(source: ModelSource) -> int:
    """Return how many tokens the model has positions for."""
    config = source.config if source.family in (ENCODER_DECODER, SPEECH) else source.text_config
    names = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "n_positions")
    room = min((limit for name in names if (limit := getattr(config, name, None))), default=1 << 20)
    if source.family in (DECODER, ENCODER_DECODER, SPEECH):
        return int(room)
    # RoBERTa and its kin number positions from after the padding token's id, which is then one of the first.
    reserved = 1 + (token_of(config, "pad_token_id") or 0)
    return int(room) - reserved if reserved < room else int(room)


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Describe fixed sizes for people; empty if all axes vary."""
    shown = ", ".join(f"{name} {sizes[name]}" for name in (BATCH, SEQUENCE, PAST) if sizes.get(name))
    return f"{shown} of the ONNX model {'are' if ',' in shown else 'is'} fixed" if shown else ""


def _unsupported_error(source: ModelSource, why: str, remedy: str) -> ONNXExportError:
    return ONNXExportError(
        f"{source.architecture} cannot have a static graph of this form: {why}",
        reason="SHAPES_UNSUPPORTED",
        remedy=remedy,
        about={"family": source.family.name, "architecture": source.architecture},
    )
