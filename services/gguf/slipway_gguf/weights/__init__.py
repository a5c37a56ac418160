"""Weights of a GGUF file: their types, their bytes, and the file itself."""
