"""Compare the adapted weights that outputs store with base and adapter, one weight after the other."""
