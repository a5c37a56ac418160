"""From the logits that runners wrote to figures, checks and a verdict."""
