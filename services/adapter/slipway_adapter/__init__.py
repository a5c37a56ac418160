"""The adapter as an output: a LoRA that servers load beside the base model, and graphs of the base that take it."""
