"""The adapter: its configuration, its tensors, and the weights they are for."""
