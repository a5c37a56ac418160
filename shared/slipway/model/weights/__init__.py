"""Weights of a model: stored in its folder, or left out and computed from other folders when they are read."""
