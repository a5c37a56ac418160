"""How PyTorch models are computed; the only modules here that import torch when they are imported, so only stages that have it import them."""
