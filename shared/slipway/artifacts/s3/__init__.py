"""The artifact store in a bucket."""
