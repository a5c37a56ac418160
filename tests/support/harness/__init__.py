"""What every test gets: leftovers are found, reports are sendable, costly things are made once."""
