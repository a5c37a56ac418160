"""Plan the tensors of each rank, write them, and check them against the model."""
