"""Return activations beside a model's results: record them, add them to a graph's interface, and describe them."""
