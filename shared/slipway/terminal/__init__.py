"""Write to a terminal, a pipe or a file."""
