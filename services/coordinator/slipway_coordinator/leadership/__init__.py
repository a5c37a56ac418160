"""One active coordinator: what standbys do, and what is answered before a coordinator is ready."""
