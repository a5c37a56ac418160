"""Which linear layers a transformers folder has, and which of its tensors hold their weights."""
