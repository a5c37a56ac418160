"""Write the report of an export: ``report.json``, ``report.html`` and the model card."""

from slipway.results.report.writing import main_file, write_report

__all__ = ["main_file", "write_report"]
