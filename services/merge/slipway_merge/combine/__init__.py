"""Several adapters combined into one."""
