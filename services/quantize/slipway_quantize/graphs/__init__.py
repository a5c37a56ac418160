"""Quantization of ONNX graphs."""
