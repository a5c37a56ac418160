"""Generate text with a model: short and long continuations, and answers to test inputs."""
