"""Look at ONNX graphs from anywhere: read them within limits, run them once on dummy input, and report what they return."""
