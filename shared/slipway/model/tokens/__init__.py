"""Tokens of models: tokenizers that only their publisher's library reads, turned into those that transformers reads."""
