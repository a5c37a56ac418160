"""What the coordinator keeps: its database, its tables, its locks."""
