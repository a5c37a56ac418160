"""The graphs of a model that takes images: its encoder of pictures, the embedding of tokens and features, and the decoder."""
