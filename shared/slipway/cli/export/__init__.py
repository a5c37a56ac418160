"""``slipway export``."""
