"""Integers for activations too: int8 matrix products with ranges found while running, or beforehand on text."""
