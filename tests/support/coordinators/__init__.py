"""Coordinators and workers for tests, and messages and files for them."""
