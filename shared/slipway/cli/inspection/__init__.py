"""``slipway doctor`` and ``slipway checkpoints``."""
