"""The validate stage: proof that every output behaves like the fine-tuned model."""
