"""Ask base, fine-tuned model and outputs one prompt, and keep their answers."""
