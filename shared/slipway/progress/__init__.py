"""Show progress on standard error, in every form."""
