"""Stage onnx_export: export a merged PyTorch model to an ONNX decoder with KV cache."""
