"""Checkpoint folders for TensorRT-LLM: its own names, one file of weights for each GPU."""
