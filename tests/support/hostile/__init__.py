"""Grammars of hostile values, and files that record when they are run."""
