"""The stage behind ``slipway convert``: pickles of weights to safetensors, for one file, one model or a tree of them."""
