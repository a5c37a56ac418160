"""Sizes of what lies within a graph's file."""

from __future__ import annotations

INLINE_BYTES = 1024
"""Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small."""

MOST_INLINE_BYTES = (2 << 30) - (64 << 20)
"""protobuf's limit of 2 GiB, less room for the graph itself."""
