"""What an export leaves for people and programs to read: ``report.json``, ``report.html`` and the model card."""

from slipway.results.report.writing import main_file, write_report

__all__ = ["main_file", "write_report"]
