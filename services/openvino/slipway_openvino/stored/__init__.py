"""Read the weights that an IR stores, for the comparison with base and adapter and for PyTorch to compute with."""
