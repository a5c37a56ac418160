"""One active coordinator: its lock, the standbys, and the refusal of calls before a coordinator is ready."""
