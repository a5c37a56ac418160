"""What an export leaves for people and programs to read: ``report.json``, ``report.html`` and the model card."""

from slipway.results.report.card import usage_examples
from slipway.results.report.writing import write_report

__all__ = ["usage_examples", "write_report"]
