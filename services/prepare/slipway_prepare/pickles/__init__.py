"""Pickled weights: checked before torch reads them, and read without running anything."""
