"""Check that an export gives PyTorch's results, at other shapes than those it was made with."""
