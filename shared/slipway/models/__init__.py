"""What goes into an export: checkpoints, adapters and base models, found and checked without loading them."""
