"""The validate stage: check that every output behaves like the fine-tuned model."""
