"""Which format and level to make for a target, and why."""
