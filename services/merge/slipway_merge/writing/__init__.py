"""Write the merged folder."""
