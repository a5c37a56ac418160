"""Rewrite decoders for fast serving, in exchange for a narrower promise."""
