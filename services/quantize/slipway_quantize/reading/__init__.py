"""Read what a transformers folder stores: tensors, and the structure of the model."""
