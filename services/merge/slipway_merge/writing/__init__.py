"""The merged folder, written."""
