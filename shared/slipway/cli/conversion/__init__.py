"""``slipway convert``."""
