"""Core ML packages for Apple's devices: the format ``coreml`` and the stage that makes it."""
