"""Slipway: the quantize stage."""
