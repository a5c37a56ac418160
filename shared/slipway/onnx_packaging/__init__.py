"""Files beside an ONNX model that let other runtimes take its folder unchanged."""
