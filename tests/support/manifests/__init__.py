"""Rendered manifests as objects, rules about them, and other people's checkers."""
