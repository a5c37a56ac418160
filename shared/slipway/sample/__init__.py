"""Train a real, small fine-tuned model to try Slipway with, on texts that come with Python."""

from slipway.sample.making import make_sample
from slipway.sample.publishing import SampleSummary
from slipway.sample.recipe import Recipe

__all__ = ["Recipe", "SampleSummary", "make_sample"]
