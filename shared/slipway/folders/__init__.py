"""Folders of work under way: locked, kept for the next attempt, or removed with their process."""
