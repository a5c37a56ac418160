"""Encoders of pictures of one size, which take any number of them. H = height, W = width, T = tokens of a picture."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def encode_pooled(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Gemma 3's and InternVL's encoders, whose own code takes any number of pictures."""
    made = model.model.get_image_features(pixel_values=tensors["pixel_values"], return_dict=True).pooler_output
    return [made.flatten(0, 1)]  # (pictures, T, width) → (tokens, width)


def encode_selected_layers(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of LLaVA's encoder. Its own code makes a list of the pictures, whose number a trace would fix."""
    inner, config = model.model, model.config
    states = inner.vision_tower(
        tensors["pixel_values"], output_hidden_states=True, return_dict=True
    ).hidden_states  # one of each layer, (pictures, 1 + T, width)
    layers = config.vision_feature_layer
    first = 1 if config.vision_feature_select_strategy == "default" else 0
    chosen = [states[layer][:, first:] for layer in ([layers] if isinstance(layers, int) else layers)]
    return [inner.multi_modal_projector(torch.cat(chosen, dim=-1)).flatten(0, 1)]


def encode_cut_pictures(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of SmolVLM's and Idefics 3's encoders: of a picture and of the parts that it is cut into.

    Their own code leaves out parts that are all zeros, and finds the place of each patch by comparisons of floats. Here each part is a
    picture, all of it, so the places are constants. pixel_values: (1, parts, 3, H, W).
    """
    inner = model.model
    eye = inner.vision_model
    places = _places_of_patches(model)  # before anything depends on the inputs
    pixels = tensors["pixel_values"].flatten(0, 1)
    hidden = eye.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)  # (parts, patches, width)
    hidden = hidden + eye.embeddings.position_embedding(places)
    hidden = eye.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
    return [inner.connector(eye.post_layernorm(hidden)).flatten(0, 1)]


def _places_of_patches(model: Any) -> torch.Tensor:
    """Return the place of each patch of a whole picture, (patches), by the model's own rule: where its share of the side falls."""
    side = int(model.model.vision_model.embeddings.num_patches_per_side)
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    along = torch.bucketize(shares, bounds, right=True)
    return (along[:, None] * side + along[None, :]).flatten()
