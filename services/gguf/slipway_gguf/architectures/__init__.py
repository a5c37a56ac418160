"""What llama.cpp computes of a model: its architecture, its numbers, its rotary embedding."""
