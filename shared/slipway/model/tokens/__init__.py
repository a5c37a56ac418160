"""What becomes of texts before a model: tokenizers that only their publisher's library reads, and what a model puts before a text."""
