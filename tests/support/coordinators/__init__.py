"""Coordinators and workers for tests, and what is sent to them."""
