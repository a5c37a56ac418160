"""Several exports with one configuration: find what to export, check everything before anything runs, run all, and keep a table."""
