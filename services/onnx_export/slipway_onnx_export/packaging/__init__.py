"""Files beside ONNX graphs that let other runtimes take the folder unchanged.

``kinds`` imports nothing heavy; stages that write graphs import the other modules.
"""
