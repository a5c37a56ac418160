"""Quantization of Hugging Face folders."""
