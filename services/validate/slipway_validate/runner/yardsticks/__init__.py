"""Compute what outputs are measured with: PyTorch on their own stored weights, the noise of their arithmetic, the cost of their level."""
