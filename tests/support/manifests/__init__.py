"""Rendered manifests as objects, rules about them, and third-party checkers."""
