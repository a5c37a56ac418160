"""The sources of an export: what its configuration names, found and looked at together, brought or left to a worker."""
