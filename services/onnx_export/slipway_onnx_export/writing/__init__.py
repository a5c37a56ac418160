"""Writing of weights beside a graph."""
