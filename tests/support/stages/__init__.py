"""Stages that do what a test asks."""
