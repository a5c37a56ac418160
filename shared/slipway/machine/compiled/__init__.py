"""Common parts of the compiled kernels: their loading, the choice for the processor, vectors for C."""
