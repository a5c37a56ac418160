"""Decide which worker runs which task."""
