"""What validation finds, as data."""
