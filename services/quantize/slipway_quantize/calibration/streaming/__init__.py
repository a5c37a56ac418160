"""A model whose weights stay in their files: layers that may be rounded, a walk over its blocks, and observers of their inputs."""
