"""What the runtimes of PyTorch share."""
