"""The merged folder, checked."""
