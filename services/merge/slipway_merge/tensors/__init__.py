"""Stored tensors: read in blocks, converted, updated."""
