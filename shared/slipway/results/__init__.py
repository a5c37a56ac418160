"""From an ended export to an ``ExportResult``, its output directory and its report."""
