"""Sizes of what lies within a graph's file."""

from __future__ import annotations

INLINE_BYTES = 1024
"""Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small."""
