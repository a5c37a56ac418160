"""A module for each architecture, or a few alike, that is written as GGUF: its tiny models and what tests expect of them. Data."""
