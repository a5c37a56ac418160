"""Check the merged folder."""
