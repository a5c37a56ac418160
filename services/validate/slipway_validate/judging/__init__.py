"""Turn the logits that runners wrote into figures, checks and a verdict."""
