"""Find and check checkpoints, adapters and base models without loading them."""
