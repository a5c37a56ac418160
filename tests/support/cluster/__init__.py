"""A whole cluster of processes that may be killed, and what must hold after any fault."""
