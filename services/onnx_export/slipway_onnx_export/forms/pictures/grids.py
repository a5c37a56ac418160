"""Qwen's encoders, which take pictures of any size: patches one after another, and the grid of each picture.

transformers computes places and windows in loops over the pictures, and attends within each by splitting. A trace would fix both, so here
they are computed from the grids, and a mask keeps pictures and windows apart. N = patches, P = pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Places:
    """The place of each patch, (N): its row and column, the height and width of its picture, and the first patch of its frame."""

    row: torch.Tensor
    column: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    frame: torch.Tensor


def encode_whole(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Qwen2-VL's encoder, whose patches see all others of their frame."""
    places = _places(model, tensors)
    return _encode(model, tensors, cu_seqlens=places.frame, position_ids=_rows_and_columns(places))


def encode_windows(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Qwen2.5-VL's encoder, most of whose layers attend within windows.

    transformers sorts the patches by windows, and back. Here they stay in place, and the mask says which share a window.
    """
    eye, places = model.model.visual, _places(model, tensors)
    merge = int(eye.spatial_merge_size)
    side = int(eye.window_size) // merge // int(eye.patch_size) * merge  # of a window, in patches
    across = (places.width + side - 1) // side
    # A frame has fewer windows than patches, so this number is no other window's.
    window = places.frame + (places.row // side) * across + places.column // side
    unsorted = torch.arange(tensors["pixel_values"].shape[0] // merge**2)
    return _encode(
        model,
        tensors,
        cu_seqlens=places.frame,
        position_ids=_rows_and_columns(places),
        window_index=unsorted,
        cu_window_seqlens=window,
    )


def encode_interpolated(model: Any, tensors: Tensors) -> list[torch.Tensor]:
    """Return the features of Qwen3-VL's and Qwen3.5's encoders, which stretch a square of learned positions over each picture."""
    places = _places(model, tensors)
    side = int(model.model.visual.num_grid_per_side)
    (upper, lower), down = _neighbours(places.row, places.height, side)
    (left, right), along = _neighbours(places.column, places.width, side)
    indices = torch.stack([upper * side + left, upper * side + right, lower * side + left, lower * side + right], dim=1)
    weights = torch.stack([(1 - down) * (1 - along), (1 - down) * along, down * (1 - along), down * along], dim=1)
    return _encode(
        model,
        tensors,
        cu_seqlens=places.frame,
        position_ids=_rows_and_columns(places),
        interp_indices=indices,
        interp_weights=weights,
    )


def _encode(model: Any, tensors: Tensors, **known: torch.Tensor) -> list[torch.Tensor]:
    """Run the encoder with what its own code would compute in loops; return its features and those for single layers."""
    eye = model.model.visual
    with _attention_within_segments(eye):
        made = eye(tensors["pixel_values"], grid_thw=tensors["image_grid_thw"], return_dict=True, **known)
    return [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]


def _places(model: Any, tensors: Tensors) -> _Places:
    """Compute the places of patches. A picture's are ordered by frames, and within a frame by blocks whose patches become one token."""
    grid, merge = tensors["image_grid_thw"], int(model.model.visual.spatial_merge_size)
    patch = torch.arange(tensors["pixel_values"].shape[0])
    counts = grid[:, 0] * grid[:, 1] * grid[:, 2]  # (P)
    ends = counts.cumsum(0)
    picture = (patch[:, None] >= ends[None, :]).to(torch.int64).sum(dim=1)  # (N)
    height, width = grid[:, 1][picture], grid[:, 2][picture]
    since = patch - (ends - counts)[picture]
    inside, across = since % (height * width), width // merge
    block = inside // merge**2
    return _Places(
        row=block // across * merge + inside // merge % merge,
        column=block % across * merge + inside % merge,
        height=height,
        width=width,
        frame=patch - inside,
    )


def _rows_and_columns(places: _Places) -> torch.Tensor:
    return torch.stack([places.row, places.column], dim=-1)  # (N, 2)


def _neighbours(
    place: torch.Tensor, size: torch.Tensor, side: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the learned positions before and after a place, and the share of the latter. The first and last places meet."""
    exact = place.float() * (side - 1) / torch.clamp(size - 1, min=1)
    before = exact.floor()
    first = before.to(torch.int64)
    return (first, torch.clamp(first + 1, max=side - 1)), exact - before


@contextmanager
def _attention_within_segments(eye: Any) -> Iterator[None]:
    """Make layers attend within segments while the block runs. Instead of lengths, they get the segment of each patch."""
    with ExitStack() as stack:
        for block in eye.blocks:
            block.attn.forward = partial(_attend, block.attn)
            stack.callback(partial(delattr, block.attn, "forward"))
        yield


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """Attend to the patches of the same segment. hidden_states: (N, width); cu_seqlens: (N), each patch's segment."""
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_vision
    joined = self.qkv(hidden_states).reshape(hidden_states.shape[0], 3, self.num_heads, -1)
    queries, keys, values = joined.permute(1, 0, 2, 3).unbind(0)  # (N, heads, head size)
    queries, keys = rotate(queries, keys, *position_embeddings)
    queries, keys, values = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    seen = (cu_seqlens[:, None] == cu_seqlens[None, :])[None, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, scale=self.scaling
    )  # (1, heads, N, head size)
    return self.proj(mixed[0].transpose(0, 1).reshape(hidden_states.shape[0], -1))
