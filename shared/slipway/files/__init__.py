"""Files of others, read within limits; links, checksums and paths."""
