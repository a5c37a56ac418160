"""Forms of a graph beside the usual one: fixed shapes, and no KV cache."""
