"""Read stored tensors in blocks, convert and update them."""
