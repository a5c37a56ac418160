"""Contracts with services that are installed beside this package and loaded by an entry point, so that nothing here imports them."""
