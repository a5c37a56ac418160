"""Two versions of Slipway side by side: the one under test, and an earlier one in an environment of its own."""
