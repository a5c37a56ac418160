"""The importance of each input of each linear layer, for formats whose quantizers weigh errors by it."""
