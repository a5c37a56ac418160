"""Rounding of weights to small integers and one scale per group."""
