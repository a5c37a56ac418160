"""Models that TensorRT-LLM can compute, and their ``config.json`` there. Light, because a client uses it before anything runs."""
