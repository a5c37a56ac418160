"""The adapter: its configuration, its tensors, and their base weights."""
