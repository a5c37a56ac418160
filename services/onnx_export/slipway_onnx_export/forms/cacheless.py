"""The graphs of models that generate, without a KV cache: each call reads the whole text again."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from slipway.model.families import DECODER, SPEECH, Family
from slipway_onnx_export.interface import Component, Port, ids
from slipway_onnx_export.loading.weightless import integer_inputs
from slipway_onnx_export.names import (
    BATCH,
    ENCODED,
    FEATURES,
    IDS,
    LOGITS,
    MASK,
    POSITIONS,
    SEQUENCE,
    SOURCE,
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
    return _encoder_and_decoder(model, speech=family is SPEECH)


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


def _encoder_and_decoder(model: Any, *, speech: bool) -> tuple[Component, Component]:
    def encode(model: Any, tensors: Tensors) -> Tensors:
        inputs = {FEATURES: tensors[FEATURES]} if speech else {IDS: tensors[IDS], MASK: tensors[MASK]}
        return {"last_hidden_state": model.get_encoder()(**inputs).last_hidden_state}

    def decode(model: Any, tensors: Tensors) -> Tensors:
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=tensors[ENCODED]),
            decoder_input_ids=tensors[IDS],
            use_cache=False,
            **({} if speech else {MASK: tensors[SOURCE_MASK]}),
        )
        return {LOGITS: output.logits}

    heard = sound_port(model) if speech else None
    given = {IDS: integer_inputs(1, 4)} if heard is None else {FEATURES: torch.zeros(1, *heard.shape[1:])}  # type: ignore[arg-type]
    made = model(**given, decoder_input_ids=integer_inputs(1, 2), use_cache=False)
    width, vocabulary = int(made.encoder_last_hidden_state.shape[-1]), int(made.logits.shape[-1])
    length: str | int = SOURCE if heard is None else int(made.encoder_last_hidden_state.shape[1])
    masks = (ids(SOURCE_MASK, BATCH, SOURCE),) if heard is None else ()
    return (
        Component(
            "encoder_model",
            inputs=(ids(IDS, BATCH, SOURCE), ids(MASK, BATCH, SOURCE)) if heard is None else (heard,),
            outputs=(Port("last_hidden_state", (BATCH, length, width)),),
            call=encode,
        ),
        Component(
            "decoder_model",
            inputs=(ids(IDS, BATCH, SEQUENCE), *masks, Port(ENCODED, (BATCH, length, width))),
            outputs=(Port(LOGITS, (BATCH, SEQUENCE, vocabulary)),),
            call=decode,
        ),
    )


def sound_port(model: Any) -> Port:
    """Return the input of a speech encoder. Its length is the encoder's positions times the strides of its convolutions."""
    strides = (layer.stride[0] for layer in model.get_encoder().children() if isinstance(layer, torch.nn.Conv1d))
    frames = int(model.config.max_source_positions)
    for stride in strides:
        frames *= int(stride)
    return Port(FEATURES, (BATCH, model.config.num_mel_bins, frames))
