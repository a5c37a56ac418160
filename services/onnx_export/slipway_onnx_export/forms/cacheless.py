"""The graphs of models that generate, without a KV cache: each call reads the whole text again."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from slipway.model.families import DECODER, Family
from slipway_onnx_export.forms.sources import source_of
from slipway_onnx_export.interface import Component, Port, ids
from slipway_onnx_export.loading.weightless import integer_inputs
from slipway_onnx_export.names import (
    BATCH,
    ENCODED,
    IDS,
    LOGITS,
    MASK,
    POSITIONS,
    SEQUENCE,
    SOURCE_MASK,
)

Tensors = dict[str, torch.Tensor]


def cacheless_components(model: Any, family: Family) -> tuple[Component, ...]:
    """Return the graphs of a decoder or an encoder–decoder.

    Args:
        model: Transformers model; its weights are not read.
        family: Its family, which generates.
    """
    if family is DECODER:
        return (_decoder(model),)
    return _encoder_and_decoder(model, family)


def _decoder(model: Any) -> Component:
    takes_positions = POSITIONS in inspect.signature(model.forward).parameters

    def call(model: Any, tensors: Tensors) -> Tensors:
        inputs = {name: tensors[name] for name in (IDS, MASK, POSITIONS) if name != POSITIONS or takes_positions}
        return {LOGITS: model(**inputs, use_cache=False).logits}

    vocabulary = int(
        model(input_ids=integer_inputs(1, 2), attention_mask=integer_inputs(1, 2), use_cache=False).logits.shape[-1]
    )
    return Component(
        "model",
        inputs=tuple(ids(name, BATCH, SEQUENCE) for name in (IDS, MASK, POSITIONS)),
        outputs=(Port(LOGITS, (BATCH, SEQUENCE, vocabulary)),),
        call=call,
        unread=(POSITIONS,),
    )


def _encoder_and_decoder(model: Any, family: Family) -> tuple[Component, Component]:
    source = source_of(model, family)

    def encode(model: Any, tensors: Tensors) -> Tensors:
        return {"last_hidden_state": source.encode(model, tensors)}

    def decode(model: Any, tensors: Tensors) -> Tensors:
        given = source.given(tensors[ENCODED], tensors.get(SOURCE_MASK))
        return {LOGITS: model(decoder_input_ids=tensors[IDS], use_cache=False, **given).logits}

    made = model(**source.example(), decoder_input_ids=integer_inputs(1, 2), use_cache=False)
    _, encoded, width = made.encoder_last_hidden_state.shape
    length: str | int = source.length or int(encoded)
    return (
        Component(
            "encoder_model",
            inputs=source.ports,
            outputs=(Port("last_hidden_state", (BATCH, length, int(width))),),
            call=encode,
        ),
        Component(
            "decoder_model",
            inputs=(ids(IDS, BATCH, SEQUENCE), *source.masks, Port(ENCODED, (BATCH, length, int(width)))),
            outputs=(Port(LOGITS, (BATCH, SEQUENCE, int(made.logits.shape[-1]))),),
            call=decode,
        ),
    )
