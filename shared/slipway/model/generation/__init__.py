"""What a model needs to generate text."""
