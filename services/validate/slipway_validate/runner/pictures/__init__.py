"""Prompts with a picture: make them for a model, and let every model compute them."""
