"""Slipway: graphs of PyTorch itself, as TorchScript and as programs of torch.export."""
