"""Read what an adapter is: its configuration, the names of its tensors, and its low-rank pairs."""
