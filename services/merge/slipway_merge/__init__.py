"""Merge stage: a LoRA adapter into its base model, exactly, in the memory of one block."""
