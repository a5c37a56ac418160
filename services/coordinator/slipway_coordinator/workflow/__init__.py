"""The durable workflow of each export, and reactions to its changes."""
