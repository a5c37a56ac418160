"""The graphs of a model that takes images: their files, and the positions of tokens among which pictures stand.

Axes: B = rows, S = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"

VISION_ENCODER, EMBEDDING = "vision_encoder.onnx", "embedding.onnx"
"""Files beside ``model.onnx``: the first makes features of pictures, the second puts them among the embeddings of text."""
TYPES = ("token_type_ids", "mm_token_type_ids")
"""Inputs of a decoder that mark the tokens of a picture with 1, from the first token of the text on."""


def three_positions(ids: Ints, mask: Ints, *, token: int, grids: Sequence[tuple[int, int]]) -> Ints:
    """Return the positions of Qwen's decoders: time, row and column of each token, (3, B, S).

    The three are equal for text. The tokens of a picture have the position of its first token as time, and their rows and columns are
    counted from it. Text goes on after the larger of both. Padding is at 0.

    Args:
        ids: Tokens. (B, S)
        mask: 1 for a token and 0 for padding. (B, S)
        token: The token that stands for a part of a picture.
        grids: Rows and columns of the tokens of each picture, in the order of the pictures.
    """
    import numpy as np

    positions = np.zeros((3, *ids.shape), np.int64)
    waiting = iter(grids)
    for row, tokens in enumerate(ids):
        columns = np.flatnonzero(mask[row])
        place, at = 0, 0
        while at < len(columns):
            if tokens[columns[at]] != token:
                positions[:, row, columns[at]] = place
                place, at = place + 1, at + 1
                continue
            down, across = next(waiting)
            for number, column in enumerate(columns[at : at + down * across]):
                positions[:, row, column] = place, place + number // across, place + number % across
            place, at = place + max(down, across), at + down * across
    return positions


def counted_positions(mask: Ints, *, new: int) -> Ints:
    """Return the positions of the last tokens of each row, counted without padding, (B, new). mask: (B, S)."""
    import numpy as np

    counted: Any = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, mask.shape[1] - new :]
    return counted
