"""The command that serves the console."""
