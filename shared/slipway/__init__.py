"""From a finished LoRA training run to models that can be served, each proven to behave like the fine-tuned one."""
