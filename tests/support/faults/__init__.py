"""Seed faults into libraries of every Python process that a command starts."""
