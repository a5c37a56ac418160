"""Signatures of others, and what they are checked with."""
