"""Weights of a model: stored in its folder, or left out and made of other folders where they are read."""
