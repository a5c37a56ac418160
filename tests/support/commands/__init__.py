"""The command in a process, on a terminal, in a browser."""
