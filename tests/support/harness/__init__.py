"""Plugins for every test: find leftovers, make reports sendable, make costly things once."""
