"""``slipway recommend``."""
