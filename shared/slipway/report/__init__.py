"""What an export leaves for people and programs to read: ``report.json``, ``report.html`` and the model card."""

from slipway.report.card import usage_examples
from slipway.report.writing import write_report

__all__ = ["usage_examples", "write_report"]
