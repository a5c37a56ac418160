"""Content that passes through the coordinator: how much at a time, how fast, whose turn it is."""
