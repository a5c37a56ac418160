"""The results of validation, as data."""
