"""Texts that transformers reads, for outputs whose runtime reads text itself."""
