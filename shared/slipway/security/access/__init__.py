"""Identify callers and check their rights: access file, tokens, roles, audit log."""
