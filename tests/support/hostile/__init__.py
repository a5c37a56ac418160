"""Grammars of hostile values, and files that tell when they are run."""
