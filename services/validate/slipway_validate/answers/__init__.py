"""The user's own test inputs: read, answered by every model, and scored against the expected answers."""
