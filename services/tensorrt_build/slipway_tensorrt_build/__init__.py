"""Slipway: the TensorRT build stage."""
