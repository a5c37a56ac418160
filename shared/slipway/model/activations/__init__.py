"""Activations of an exported graph: what may be asked for, the contract that describes them, and how a graph differs from it."""
