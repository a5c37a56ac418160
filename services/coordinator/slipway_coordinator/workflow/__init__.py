"""The durable workflow of each export, and what follows from how exports change."""
