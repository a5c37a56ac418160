"""Key of our own in a file: the kinds of text that llama.cpp is known to read otherwise, so that validation tells them from a fault."""

DIFFERS = "slipway.tokenizer.differs"
BETWEEN = "; "
"""What parts the kinds (``slipway.validation.texts.TextKind``)."""
