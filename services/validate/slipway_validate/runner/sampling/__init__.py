"""Make the samples of a family: windows of text, or sound, with what is compared on them."""
