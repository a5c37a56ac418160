"""The runner: load one model in its own process and compute its results."""
