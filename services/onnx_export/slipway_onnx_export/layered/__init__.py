"""A text decoder as one graph per block, for models that are too large or too odd to export whole."""
