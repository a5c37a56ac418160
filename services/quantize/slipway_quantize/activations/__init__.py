"""Integers for activations too: int8 matrix products with ranges measured while running, or beforehand on text."""
