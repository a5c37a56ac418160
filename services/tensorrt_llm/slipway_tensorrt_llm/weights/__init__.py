"""The tensors of each rank: planned, written, and found again in the model."""
