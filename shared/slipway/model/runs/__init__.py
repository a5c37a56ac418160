"""A training run as trainers leave it: its checkpoints, whole or in pieces, and the adapters of other tools."""
