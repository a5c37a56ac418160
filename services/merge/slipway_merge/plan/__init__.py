"""Plan the merge before a byte is read."""
