"""Encode the user's test inputs: texts by the tokenizer, sounds by the feature extractor."""
