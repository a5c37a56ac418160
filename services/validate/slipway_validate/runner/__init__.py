"""One model in one process: what runs it, and what it computes."""
