"""Encoders of one picture of any size: Pixtral's, SigLIP 2's and Gemma 4's. H = height, W = width, N = patches.

The picture comes without padding. Several pictures are several calls, whose features are joined.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def encode_any_size(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Pixtral's encoder, and of Mistral 3's projection of them. pixel_values: (1, 3, H, W)."""
    inner, config = model.model, model.config
    pixels = tensors["pixel_values"]
    with _every_patch_seen(inner.vision_tower):
        made = inner.vision_tower(pixels, image_sizes=None, output_hidden_states=True, return_dict=True)
    layers = config.vision_feature_layer
    chosen = [made.hidden_states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
    projector, side = inner.multi_modal_projector, int(inner.vision_tower.patch_size)
    hidden = projector.norm(torch.cat(chosen, dim=-1).squeeze(0))  # (N, width)
    merger = projector.patch_merger
    merge, width = int(merger.spatial_merge_size), hidden.shape[-1]
    rows, columns = pixels.shape[2] // side // merge, pixels.shape[3] // side // merge
    # A token is made of a square of patches; the values of a channel follow each other.
    squares = hidden.reshape(rows, merge, columns, merge, width).permute(0, 2, 4, 1, 3)
    tokens = merger.merging_layer(squares.reshape(rows * columns, width * merge**2))
    return [projector.linear_2(projector.act(projector.linear_1(tokens)))]


@contextmanager
def _every_patch_seen(eye: Any) -> Iterator[None]:
    """Leave out the mask that keeps pictures apart while the block runs."""
    source = sys.modules[type(eye).__module__]
    masks, name = source.generate_block_attention_mask, "generate_block_attention_mask"
    setattr(source, name, lambda _sizes, _tensor: None)
    try:
        yield
    finally:
        setattr(source, name, masks)


def encode_shaped(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of SigLIP 2's encoder, and of LFM2-VL's projection of them.

    pixel_values: (1, N, values of a patch); spatial_shapes: (1, 2), rows and columns of patches.
    """
    inner = model.model
    eye, projector = inner.vision_tower, inner.multi_modal_projector
    pixels, columns = tensors["pixel_values"], tensors["spatial_shapes"][0, 1]
    hidden = eye.embeddings.patch_embedding(pixels) + _stretched_positions(eye.embeddings, tensors)[None]
    hidden = eye.post_layernorm(eye.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state)
    merge, width = int(projector.factor), hidden.shape[-1]
    token = torch.arange(pixels.shape[1] // merge**2)
    inside, across = torch.arange(merge), columns // merge
    down, along = (token // across)[:, None, None] * merge, (token % across)[:, None, None] * merge
    patch = (down + inside[None, :, None]) * columns + along + inside[None, None, :]  # (tokens, merge, merge)
    merged = hidden[0][patch].reshape(-1, width * merge**2)
    if projector.use_layer_norm:
        merged = projector.layer_norm(merged)
    return [projector.linear_2(projector.act(projector.linear_1(merged)))]


def _stretched_positions(embeddings: Any, tensors: Tensors) -> torch.Tensor:
    """Return the learned positions, stretched or shrunk over the picture as by ``interpolate(antialias=True)``, (N, width).

    Each axis is a product with a matrix of triangles, so that the number of rows may vary.
    """
    side = int(embeddings.position_embedding_size)
    table = embeddings.position_embedding.weight.reshape(side, side, -1)
    rows, columns = tensors["spatial_shapes"][0, 0], tensors["spatial_shapes"][0, 1]
    patch = torch.arange(tensors["pixel_values"].shape[1])
    down = _triangles(patch // columns, rows, side)  # (N, side)
    along = _triangles(patch % columns, columns, side)
    mixed = (down @ table.reshape(side, -1)).reshape(patch.shape[0], side, -1)  # (N, side, width)
    return (mixed * along[:, :, None]).sum(dim=1)


def _triangles(place: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
    """Return the shares of ``side`` learned positions in places of an axis of a size, (N, side)."""
    step = side / size.float()
    center = (place.float() + 0.5) * step
    reach = torch.clamp(step, min=1.0)  # a shrunk axis takes the mean of more positions
    distance = (torch.arange(side).float()[None, :] + 0.5 - center[:, None]).abs() / reach
    shares = torch.relu(1.0 - distance)
    return shares / shares.sum(dim=1, keepdim=True)


def encode_placed(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Gemma 4's encoder.

    pixel_values: (1, N, values of a patch); image_position_ids: (1, N, 2), column and row of each patch.
    """
    inner = model.model
    eye, pixels, places = inner.vision_tower, tensors["pixel_values"], tensors["image_position_ids"]
    nothing = torch.zeros_like(places[..., 0], dtype=torch.bool)  # no patch is padding
    hidden = eye.patch_embedder(pixels, places, nothing)
    # Every patch sees every other, so no mask is made.
    rotations = eye.encoder.rotary_emb(hidden, places)
    for layer in eye.encoder.layers[: eye.encoder.config.num_hidden_layers]:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotations, position_ids=places)
    pooled = _means(hidden[0], places[0], side=int(eye.config.pooling_kernel_size)) * eye.pooler.root_hidden_size
    if eye.config.standardize:
        pooled = (pooled - eye.std_bias.float()) * eye.std_scale.float()
    return [inner.embed_vision(inputs_embeds=pooled)]


def _means(hidden: torch.Tensor, places: torch.Tensor, *, side: int) -> torch.Tensor:
    """Return the mean of each square of patches, (N / side², width). hidden: (N, width); places: (N, 2), columns and rows."""
    tokens = hidden.shape[0] // side**2
    across = (places[:, 0].max() + 1) // side
    square = places[:, 0] // side + across * (places[:, 1] // side)  # (N)
    shares = (square[None, :] == torch.arange(tokens)[:, None]).to(hidden.dtype) / side**2
    return shares @ hidden
