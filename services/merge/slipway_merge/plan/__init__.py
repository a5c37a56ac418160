"""The merge decided before a byte is read."""
