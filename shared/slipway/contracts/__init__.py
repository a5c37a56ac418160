"""Contracts with what is installed beside this package and found by an entry point, so that nothing here imports a service."""
