"""The three graphs of a model that takes images, in the form of onnxruntime-genai's packages of several graphs.

``vision_encoder`` makes features of pictures, ``embedding`` puts them in the places of the image's tokens among the embeddings of text,
and ``model`` is the decoder, with embeddings in the place of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipway.proof.pictures import make_picture
from slipway_onnx_export.forms.cache import Layout, cache_of, ports_of, tensors_of
from slipway_onnx_export.forms.pictures.kinds import PictureKind, kind_of
from slipway_onnx_export.interface import Component, Port, ids
from slipway_onnx_export.loading.weightless import try_out
from slipway_onnx_export.names import (
    BATCH,
    DEEPSTACK,
    DEEPSTACK_EMBEDS,
    EMBEDDING,
    EMBEDS,
    IDS,
    IMAGE_FEATURES,
    IMAGE_TOKENS,
    LOGITS,
    MASK,
    PAST,
    PER_LAYER,
    POSITIONS,
    SEQUENCE,
    TOTAL,
    VISION_ENCODER,
)

Tensors = dict[str, torch.Tensor]
_PAST, _PRESENT = "past_key_values.{}.{}", "present.{}.{}"
_SIZES = {"rows": 2, "tokens": 7, "past": 5}
_GRIDS = ((4, 6), (2, 8))
"""Rows and columns of tokens of the traced pictures, where their size is free."""


def components_with_pictures(
    model: Any, layout_of_cache: Callable[[], tuple[Layout, int]], *, layers: int
) -> tuple[Component, ...]:
    """Return encoder, embedding and decoder of a model that takes images.

    Args:
        model: The whole model of transformers.
        layout_of_cache: Returns what its decoder keeps between calls, and the size of its vocabulary.
        layers: Number of the decoder's layers.
    """
    kind = kind_of(model.config)
    encoder = _encoder(model, kind)
    embedding = _embedding(model, single=len(encoder.outputs) - 1)
    layout, vocabulary = layout_of_cache()
    return encoder, embedding, _decoder(model, kind, embedding, layout, vocabulary, layers=layers)


# Pictures.


def _encoder(model: Any, kind: PictureKind) -> Component:
    samples = _pictures(model.config, kind)

    def call(model: Any, tensors: Tensors) -> Tensors:
        made = kind.encode(model, tensors)
        return dict(zip(names, made, strict=True))

    made = try_out(model, lambda: [tuple(each.shape) for each in kind.encode(model, dict(samples))])
    names = [IMAGE_FEATURES, *(DEEPSTACK.format(number) for number in range(len(made) - 1))]
    return Component(
        VISION_ENCODER,
        inputs=tuple(
            Port(name, tuple(axes[i] or size for i, size in enumerate(samples[name].shape)), samples[name].dtype)
            for name, axes in kind.inputs.items()
        ),
        outputs=tuple(Port(name, (IMAGE_TOKENS, int(shape[-1]))) for name, shape in zip(names, made, strict=True)),
        call=call,
        samples=samples,
    )


def _pictures(config: Any, kind: PictureKind) -> Tensors:
    """Return the encoder's inputs for a picture, or for two of different sizes where it takes several."""
    grids = _GRIDS[:1] if kind.joined is None else _GRIDS
    made = [make_picture(config, seed=number, tokens=grid) for number, grid in enumerate(grids)]
    arguments = [each.arguments for each in made if each is not None]
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in arguments], axis=kind.joined or 0))
        for name in kind.inputs
    }


# Embeddings.


def _embedding(model: Any, *, single: int) -> Component:
    """Return the graph of embeddings; ``single`` counts the features that single layers add."""
    width = int(model.config.get_text_config(decoder=True).hidden_size)
    features = (IMAGE_FEATURES, *(DEEPSTACK.format(number) for number in range(single)))
    spread = (EMBEDS, *(DEEPSTACK_EMBEDS.format(number) for number in range(single)))
    per_layer = _per_layer_sizes(model)

    def call(model: Any, tensors: Tensors) -> Tensors:
        tokens = tensors[IDS]
        texts = _tokens_of_text(model.config, tokens)
        embeds = model.get_input_embeddings()(texts)
        place = _places_of_features(tokens == model.config.image_token_id, tensors[IMAGE_FEATURES])
        made = {EMBEDS: _put(tensors[IMAGE_FEATURES], place, embeds)}
        for name, feature in zip(spread[1:], features[1:], strict=True):
            made[name] = _put(tensors[feature], place, torch.zeros_like(embeds))
        if per_layer:
            made[PER_LAYER] = model.model.language_model.get_per_layer_inputs(texts, embeds)
        return made

    image = int(model.config.image_token_id)
    tokens = torch.ones((_SIZES["rows"], _SIZES["tokens"]), dtype=torch.int64)
    tokens[0, 2:5] = image
    return Component(
        EMBEDDING,
        inputs=(ids(IDS, BATCH, SEQUENCE), *(Port(name, (IMAGE_TOKENS, width)) for name in features)),
        outputs=(
            *(Port(name, (BATCH, SEQUENCE, width)) for name in spread),
            *([Port(PER_LAYER, (BATCH, SEQUENCE, *per_layer))] if per_layer else []),
        ),
        call=call,
        samples={IDS: tokens, **{name: torch.zeros(3, width) for name in features}},
    )


def _per_layer_sizes(model: Any) -> tuple[int, ...]:
    """Return the number of layers and the width of what each layer of Gemma 4 gets of a token; empty for other models."""
    text = model.config.get_text_config(decoder=True)
    width = int(getattr(text, "hidden_size_per_layer_input", 0) or 0)
    return (int(text.num_hidden_layers), width) if width else ()


def _tokens_of_text(config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose embeddings are looked up: where transformers pads the tokens of images and sound, so does the graph."""
    text = config.get_text_config(decoder=True)
    if config.model_type == "gemma4":
        placeholders = (config.image_token_id, config.video_token_id, config.audio_token_id)
        for token in placeholders:
            if token is not None:
                tokens = torch.where(tokens == token, text.pad_token_id, tokens)
    elif config.image_token_id >= text.vocab_size:
        tokens = torch.where(tokens == config.image_token_id, 0, tokens)
    return tokens


def _places_of_features(image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the number of the feature of each token, from 1; 0 for text, and for tokens of images beyond the last feature.

    image: (batch, tokens), whether a token stands for a feature; features: (image tokens, width).
    """
    number = image.flatten().to(torch.int64).cumsum(0).reshape(image.shape)
    return torch.where(image & (number <= features.shape[0]), number, 0)


def _put(features: torch.Tensor, place: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return features in their places, and ``others`` elsewhere, (batch, tokens, width)."""
    rows = torch.cat([torch.zeros_like(features[:1].sum(0, keepdim=True)), features])  # also without features
    return torch.where((place > 0)[..., None], rows[place], others)


# The decoder.


def _decoder(
    model: Any, kind: PictureKind, embedding: Component, layout: Layout, vocabulary: int, *, layers: int
) -> Component:
    cache_in = ports_of(layout, _PAST, PAST)
    types = kind.types(model.config)
    single = [port.name for port in embedding.outputs if port.name not in (EMBEDS, PER_LAYER)]
    positions = ids(POSITIONS, *((3,) if kind.thrice else ()), BATCH, SEQUENCE)

    def call(model: Any, tensors: Tensors) -> Tensors:
        past = cache_of(layout, [tensors[port.name] for port in cache_in], layers)
        given: dict[str, Any] = {name: tensors[name] for name in (EMBEDS, MASK, POSITIONS)}
        given |= {name: tensors[name] for name in (types, PER_LAYER) if name in tensors}
        if not single:
            output = model(**given, past_key_values=past, use_cache=True)
            return {LOGITS: output.logits, **tensors_of(output.past_key_values, layout, _PRESENT)}
        # The whole class finds the places of such features by itself; its text model takes them as they come.
        text = model.model.language_model
        text._deepstack_process = _add_everywhere
        try:
            features = [tensors[name] for name in single]
            output = text(**given, past_key_values=past, use_cache=True, deepstack_visual_embeds=features)
        finally:
            del text._deepstack_process
        logits = model.lm_head(output.last_hidden_state)
        return {LOGITS: logits, **tensors_of(output.past_key_values, layout, _PRESENT)}

    inputs = (
        *(port for port in embedding.outputs if port.name == EMBEDS),
        ids(MASK, BATCH, TOTAL),
        positions,
        *([ids(types, BATCH, TOTAL)] if types else []),
        *(port for port in embedding.outputs if port.name != EMBEDS),
        *cache_in,
    )
    return Component(
        "model",
        inputs=inputs,
        outputs=(Port(LOGITS, (BATCH, SEQUENCE, vocabulary)), *ports_of(layout, _PRESENT, TOTAL)),
        call=call,
        samples=_sample_of_decoder(inputs, types),
    )


def _add_everywhere(hidden_states: torch.Tensor, _: Any, features: torch.Tensor) -> torch.Tensor:
    """Add features that are zero where there are none."""
    return hidden_states + features


def _sample_of_decoder(inputs: tuple[Port, ...], types: str) -> Tensors:
    """Return the usual sample, with positions of three numbers and the tokens of a picture where the decoder takes them."""
    samples = {port.name: port.sample() for port in inputs}
    new = samples[POSITIONS].shape[-1]
    counted = (samples[MASK].cumsum(1) - 1).clamp(min=0)[:, -new:]
    samples[POSITIONS] = counted.expand(samples[POSITIONS].shape).contiguous()
    if types:
        samples[types][:, 3:6] = 1
    return samples
