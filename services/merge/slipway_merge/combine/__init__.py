"""Combine several adapters into one."""
