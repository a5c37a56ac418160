"""The command that publishes a delivered folder."""
