"""Prove that an output computes what it should: the interface of runtimes, and the comparison of results."""
