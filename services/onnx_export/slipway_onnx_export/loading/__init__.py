"""Take weights and modules of transformers as a graph needs them: under their loaded names, and without choices by value."""
