"""Which worker runs what."""
