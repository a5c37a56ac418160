"""A LoRA on a real, small base model, whose weights the package index carries."""

from slipway.sample.real.making import RealRecipe, make_real_sample

__all__ = ["RealRecipe", "make_real_sample"]
