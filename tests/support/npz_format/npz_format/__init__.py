"""A format of another distribution: a model's weights in one numpy archive, unquantized and in half precision."""
