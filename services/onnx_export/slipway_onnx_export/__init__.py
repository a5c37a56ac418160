"""Stage onnx_export: export a merged PyTorch model to ONNX graphs."""
