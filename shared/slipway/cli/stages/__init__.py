"""``slipway stage`` and ``slipway sample``."""
