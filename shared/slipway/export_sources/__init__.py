"""The sources of an export: find them, check them together, then upload them or let a worker import them."""
