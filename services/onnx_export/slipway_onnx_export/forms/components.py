"""Choose a model's graphs by its family, find the shapes of its cache without computing, and a sentence encoder's pooling.

A sentence encoder's graph returns the text's vector only if its pooling is known.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from slipway.errors import ONNXExportError, is_own_fault
from slipway.machine.shortages import is_out_of_memory
from slipway.model.configuration import token_of
from slipway.model.families import (
    DECODER,
    FEATURE_EXTRACTION,
    PAIRS,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, UnknownPoolingError, load_pooling, pool, read_pooling
from slipway.stage import Context
from slipway_onnx_export.forms.cache import (
    Layout,
    UnknownCacheError,
    cache_of,
    keys_and_values,
    layout_of,
    ports_of,
    tensors_of,
)
from slipway_onnx_export.forms.cacheless import cacheless_components
from slipway_onnx_export.forms.pictures.parts import components_with_pictures
from slipway_onnx_export.forms.sources import source_of
from slipway_onnx_export.interface import Call, Component, Port, ids
from slipway_onnx_export.loading.weightless import integer_inputs, try_out
from slipway_onnx_export.names import (
    BATCH,
    IDS,
    LOGITS,
    MASK,
    PAST,
    POSITIONS,
    SEQUENCE,
    SOURCE_MASK,
    TOTAL,
    TYPES,
)
from slipway_onnx_export.source import ModelSource

Tensors = dict[str, torch.Tensor]
_PAST, _PRESENT = "past_key_values.{}.{}", "present.{}.{}"


def components_of(
    model: Any, source: ModelSource, *, cache: bool = True, pictures: bool = False
) -> tuple[Component, ...]:
    """Return the graphs of a model.

    Args:
        model: Transformers model of the source; its weights are not read.
        source: The model's folder.
        cache: Whether a model that generates has a KV cache.
        pictures: Whether a model that takes images has graphs for them too.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED`` if its cache is not keys and values of attention, or if it does not take what
            models of its family take.
    """
    try:
        if not cache and source.family.generates:
            return try_out(model, lambda: cacheless_components(model, source.family))
        if pictures:
            return components_with_pictures(model, partial(_kept_between_calls, model), layers=_layers(model))
        if source.family is DECODER:
            return (_decoder(model),)
        if source.family in PAIRS:
            return _encoder_and_decoder(model, source.family, start=source.start)
        return (_text_component(model, source.family, pooling_of(source)),)
    except ONNXExportError:
        raise
    except Exception as error:  # the model's own code may raise anything
        if is_out_of_memory(error) or is_own_fault(error):
            raise
        raise _unsupported_error(
            model, f"does not run as {source.family.name} models do ({type(error).__name__}: {error})"
        ) from error


# Decoders.


def _decoder(model: Any) -> Component:
    takes_positions = POSITIONS in inspect.signature(model.forward).parameters

    def call(model: Any, tensors: Tensors) -> Tensors:
        past = [tensors[port.name] for port in cache_in]
        inputs = {name: tensors[name] for name in (IDS, MASK, POSITIONS) if name != POSITIONS or takes_positions}
        output = model(**inputs, past_key_values=cache_of(layout, past, layers), use_cache=True)
        return {LOGITS: output.logits, **tensors_of(output.past_key_values, layout, _PRESENT)}

    layers = _layers(model)
    layout, vocabulary = _kept_between_calls(model)
    cache_in = ports_of(layout, _PAST, PAST)
    return _decoder_component(layout, vocabulary, call)


def _layers(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _kept_between_calls(model: Any) -> tuple[Layout, int]:
    """Return what a decoder keeps between calls, and the size of its vocabulary."""

    def run() -> tuple[Layout, int]:
        tokens = integer_inputs(1, 2)
        empty = DynamicCache(config=model.config)
        made = model(input_ids=tokens, attention_mask=tokens, past_key_values=empty, use_cache=True)
        return _layout(model, getattr(made, "past_key_values", None)), int(made[LOGITS].shape[-1])

    return try_out(model, run)


def untraced_decoder(layers: int) -> Component:
    """Return the component of a decoder whose graph is built and not traced: only the graph knows its sizes."""
    return _decoder_component(keys_and_values(layers), None, None)


def _decoder_component(layout: Layout, vocabulary: int | None, call: Call | None) -> Component:
    return Component(
        "model",
        inputs=(
            ids(IDS, BATCH, SEQUENCE),
            ids(MASK, BATCH, TOTAL),
            ids(POSITIONS, BATCH, SEQUENCE),
            *ports_of(layout, _PAST, PAST),
        ),
        outputs=(Port(LOGITS, (BATCH, SEQUENCE, vocabulary)), *ports_of(layout, _PRESENT, TOTAL)),
        call=call,
        unread=(POSITIONS,),
    )


# Encoder–decoders: the encoder computes keys and values of the cross-attention once, the decoder returns only its own.


def _encoder_and_decoder(model: Any, family: Family, *, start: int) -> tuple[Component, Component]:
    source = source_of(model, family)

    def encode(model: Any, tensors: Tensors) -> Tensors:
        encoded = source.encode(model, tensors)
        # One step of the decoder computes keys and values of every cross-attention; the rest of it is removed as unused.
        output = model(
            decoder_input_ids=torch.full((encoded.shape[0], 1), start, dtype=torch.int64),
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            use_cache=True,
            **source.given(encoded, tensors.get(MASK)),
        )
        return {
            "last_hidden_state": encoded,
            **tensors_of(output.past_key_values.cross_attention_cache, cross, "present.{}.encoder.{}"),
        }

    def decode(model: Any, tensors: Tensors) -> Tensors:
        crossed = [tensors[port.name] for port in cross_in]
        past = [tensors[port.name] for port in own_in]
        cache = EncoderDecoderCache(cache_of(own, past, len(own) // 2), cache_of(cross, crossed, len(cross) // 2))
        cache.is_updated = dict.fromkeys(cache.is_updated, True)
        # Attention reads the cache instead; only the sizes of batch and source are taken from this.
        encoded = crossed[0].transpose(1, 2).flatten(2)
        output = model(
            decoder_input_ids=tensors[IDS],
            past_key_values=cache,
            use_cache=True,
            **source.given(encoded, tensors.get(SOURCE_MASK)),
        )
        present = output.past_key_values.self_attention_cache
        return {LOGITS: output.logits, **tensors_of(present, own, "present.{}.decoder.{}")}

    def run() -> tuple[Layout, Layout, torch.Size, int]:
        made = model(**source.example(), decoder_input_ids=integer_inputs(1, 2), use_cache=True)
        caches = getattr(made, "past_key_values", None)
        if not isinstance(caches, EncoderDecoderCache):
            raise _unsupported_error(model, f"has a {type(caches).__name__} instead of keys and values of attention")
        own, cross = (_layout(model, each) for each in (caches.self_attention_cache, caches.cross_attention_cache))
        return own, cross, made["encoder_last_hidden_state"].shape, int(made[LOGITS].shape[-1])

    own, cross, (_, encoded, width), vocabulary = try_out(model, run)
    length: str | int = source.length or encoded
    own_in = ports_of(own, "past_key_values.{}.decoder.{}", PAST)
    cross_in = ports_of(cross, "past_key_values.{}.encoder.{}", length)
    encoder = Component(
        "encoder_model",
        inputs=source.ports,
        outputs=(
            Port("last_hidden_state", (BATCH, length, width)),
            *ports_of(cross, "present.{}.encoder.{}", length),
        ),
        call=encode,
    )
    decoder = Component(
        "decoder_model",
        inputs=(ids(IDS, BATCH, SEQUENCE), *source.masks, *own_in, *cross_in),
        outputs=(Port(LOGITS, (BATCH, SEQUENCE, vocabulary)), *ports_of(own, "present.{}.decoder.{}", TOTAL)),
        call=decode,
    )
    return encoder, decoder


# Models that read a whole text in one call.


def _text_component(model: Any, family: Family, pooling: Pooling | None) -> Component:
    accepted = inspect.signature(model.forward).parameters
    names = [IDS, MASK] + ([TYPES] if TYPES in accepted and _token_types(model.config) > 1 else [])
    rows: str | int = BATCH
    if (
        family is SEQUENCE_CLASSIFIER
        and token_of(model.config, "pad_token_id") is None
        and model.get_decoder() is not model
    ):
        rows = 1  # the last token cannot be told from padding
    classes = getattr(model.config, "num_labels", 0)
    # Classifiers of encoder–decoders read the ends of the texts, and refuse a text without one.
    end = (token_of(model.config, "eos_token_id") or 0) if model.config.is_encoder_decoder else 0
    rotates = POSITIONS in accepted and getattr(model.config, "rope_parameters", None) is not None

    def call(model: Any, tensors: Tensors) -> Tensors:
        inputs = dict(tensors)
        if rotates:  # fused rotation needs positions for each row
            inputs[POSITIONS] = torch.arange(tensors[IDS].shape[1])[None].expand_as(tensors[IDS])
        output = model(**inputs)
        given = {name: output[name] for name in family.outputs}
        return given | ({SENTENCE_EMBEDDING: pool(output[0], tensors[MASK], pooling)} if pooling else {})

    shape: tuple[str | int, ...]
    if family is SEQUENCE_CLASSIFIER:
        shape = (rows, classes)
    elif family is QUESTION_ANSWERING:
        shape = (rows, SEQUENCE)
    elif family is TOKEN_CLASSIFIER:
        shape = (rows, SEQUENCE, classes)
    else:
        sizes = try_out(model, lambda: model(**{name: integer_inputs(1, 3) for name in names})[family.outputs[0]].shape)
        shape = (rows, SEQUENCE, int(sizes[-1]))
    outputs = [Port(name, shape) for name in family.outputs]
    if pooling:
        outputs.append(Port(SENTENCE_EMBEDDING, (rows, pooling.width(int(shape[-1])))))
    return Component(
        "model",
        inputs=tuple(Port(name, (rows, SEQUENCE), torch.int64, end if name == IDS else 0) for name in names),
        outputs=tuple(outputs),
        call=call,
    )


def _token_types(config: Any) -> int:
    return int(getattr(config, "type_vocab_size", 0) or 0)


# Caches.


def _layout(model: Any, cache: Any) -> Layout:
    try:
        return layout_of(cache)
    except UnknownCacheError as error:
        raise _unsupported_error(model, f"has {error} instead of keys and values of attention") from error


def _unsupported_error(model: Any, what: str) -> ONNXExportError:
    return ONNXExportError(
        f"{type(model).__name__} {what}, which the ONNX export does not support",
        reason="FAMILY_UNSUPPORTED",
        remedy="leave the ONNX format out for this model",
        about={"architecture": type(model).__name__, "model_type": model.config.model_type},
    )


def pooling_of(source: ModelSource) -> Pooling | None:
    """Return how a sentence encoder pools a text into one vector; None for other models, or if that is not known."""
    try:
        return load_pooling(source.folder) if source.family is FEATURE_EXTRACTION else None
    except UnknownPoolingError:
        return None


def warn_of_unknown_pooling(source: ModelSource, ctx: Context) -> None:
    """Warn if a sentence encoder's graph gives the vectors of tokens only."""
    if source.family is not FEATURE_EXTRACTION:
        return
    try:
        read_pooling(source.folder)
    except UnknownPoolingError as error:
        ctx.warn(
            f"the ONNX model has no output sentence_embedding: {error}; pool its last_hidden_state as the model's files say"
        )
