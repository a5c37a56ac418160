"""Check a written folder before anything uses it."""
