"""Run the graphs of an ONNX folder, by the family of its model."""
