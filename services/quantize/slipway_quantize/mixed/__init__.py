"""Choose how many bits each weight gets, within a size."""
