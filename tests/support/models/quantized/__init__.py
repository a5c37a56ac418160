"""Weights that other libraries quantized, and the script that made them."""
