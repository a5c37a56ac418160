"""ExecuTorch programs for phones and other small machines: the format ``executorch`` and the stage that makes it."""
