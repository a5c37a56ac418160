"""A LoRA on a real, small base model, whose weights the package index carries."""

from slipway.sample.real.making import make_real_sample
from slipway.sample.real.recipe import RealRecipe

__all__ = ["RealRecipe", "make_real_sample"]
