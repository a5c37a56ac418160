"""Run a GGUF file with llama.cpp on the CPU, for validation."""

from slipway_gguf.runtime.model import load

__all__ = ["load"]
