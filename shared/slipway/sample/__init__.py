"""Train a real, small fine-tuned model to try Slipway with, on texts that come with Python."""

from slipway.sample.making import SampleSummary, make_sample
from slipway.sample.recipe import Recipe

__all__ = ["Recipe", "SampleSummary", "make_sample"]
