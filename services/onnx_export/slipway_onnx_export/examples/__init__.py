"""Examples of use: the one of a model's family is copied into the exported folder as ``example.py``."""
