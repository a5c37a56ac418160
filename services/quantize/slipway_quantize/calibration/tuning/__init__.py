"""Tune all rounded weights together by gradients of the divergence."""
