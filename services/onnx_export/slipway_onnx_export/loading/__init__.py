"""Prepare transformers' weights and modules for a graph: weights have their loaded names, modules do not branch on values."""
