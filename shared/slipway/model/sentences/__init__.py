"""Sentence encoders: how a text's tokens become one vector, as the files of sentence-transformers say."""
