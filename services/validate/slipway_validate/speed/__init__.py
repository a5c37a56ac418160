"""Time outputs beside the reference, and say which are slower than their originals."""
