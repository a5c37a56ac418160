"""Read files of others within limits; links, checksums and paths."""
