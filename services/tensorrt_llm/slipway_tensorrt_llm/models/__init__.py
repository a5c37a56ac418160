"""What TensorRT-LLM computes of a model, and what its ``config.json`` says there. Light: a client asks before anything runs."""
