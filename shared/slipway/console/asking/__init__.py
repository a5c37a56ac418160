"""Ask base, fine-tuned model and outputs of an export one prompt, on the machine that has them."""
