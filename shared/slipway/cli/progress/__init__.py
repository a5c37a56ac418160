"""Progress on standard error, in every form."""
