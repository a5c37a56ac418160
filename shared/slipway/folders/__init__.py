"""Folders of running work: locked, kept for the next attempt, or removed with their process."""
