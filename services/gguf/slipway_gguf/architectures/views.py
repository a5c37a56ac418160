"""Views of tensors, for entries of the table: rows and columns in another order, parts of a tensor. Light: no numpy.

``tiled``: ggml repeats the heads of queries and keys as (0, 1, …, 0, 1, …), and transformers as (0, 0, …, 1, 1, …). So heads of values that
share one head of keys lie behind each other in the model, and with a distance in the file.
"""

from __future__ import annotations

from typing import Any

from slipway_gguf.architectures.entry import View


def rows(first: int, end: int | None = None) -> View:
    """Return a view of some rows."""
    return lambda whole: whole[first:end]


def first_row(times: int) -> View:
    """Return the first row some times. This is a copy."""
    return lambda whole: whole[[0] * times]


def tiled_rows(groups: int, each: int, width: int) -> View:
    """Return a view with the heads in ggml's order. (groups · each · width, …) → (each, groups, width, …)."""
    return lambda whole: whole.reshape(groups, each, width, *whole.shape[1:]).swapaxes(0, 1)


def tiled_columns(groups: int, each: int, width: int) -> View:
    """Return a view with the heads in ggml's order. (…, groups · each · width) → (…, each, groups, width)."""
    return lambda whole: whole.reshape(*whole.shape[:-1], groups, each, width).swapaxes(-3, -2)


def in_groups(groups: int, first: int, end: int) -> View:
    """Return a view of the same rows of each group. (groups · n, …) → (groups, end - first, …)."""
    return lambda whole: whole.reshape(groups, -1, *whole.shape[1:])[:, first:end]


def of_heads(heads: int, first: int, end: int) -> View:
    """Return a view of the same rows of each head, as a matrix for each. (heads · n, columns) → (heads, end - first, columns)."""
    return lambda whole: whole.reshape(heads, -1, whole.shape[-1])[:, first:end]


def without_middle(whole: Any) -> Any:
    """Return a convolution's weight without its axis of size 1. (channels, 1, kernel) → (channels, kernel)."""
    return whole[:, 0, :]


def as_column(whole: Any) -> Any:
    """Return a vector as a matrix with one column."""
    return whole[:, None]


def as_groups(groups: int) -> View:
    """Return a view of a vector with one row for each group."""
    return lambda whole: whole.reshape(groups, -1)


def half(which: int) -> View:
    """Return a view of the first (0) or second (1) half of the rows, of each expert if there are three axes."""

    def view(whole: Any) -> Any:
        axis = whole.ndim - 2
        size = whole.shape[axis] // 2
        part = slice(which * size, (which + 1) * size)
        return whole[:, part] if axis else whole[part]

    return view


def every_second(first: int) -> View:
    """Return a view of every second value of the last axis, from this one on."""
    return lambda whole: whole[..., first::2]


def transposed_experts(whole: Any) -> Any:
    """Return the matrices of experts with their axes exchanged. (experts, in, out) → (experts, out, in)."""
    return whole.swapaxes(1, 2)


def paired_rows(heads: int) -> View:
    """Return a view with the rows of each head so that the two values of a pair, which the rotary embedding turns together, are neighbours.

    transformers has the first values of all pairs in a head's first half, and the second values in its second half.
    (heads · width, …) → (heads, width / 2, 2, …)
    """
    return lambda whole: whole.reshape(heads, 2, -1, *whole.shape[1:]).swapaxes(1, 2)
