"""Checkpoints, adapters and base models, found and checked without loading them."""
