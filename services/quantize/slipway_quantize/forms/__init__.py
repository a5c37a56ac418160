"""The forms in which the PyTorch levels store the weight of a linear layer: formats of compressed-tensors."""
