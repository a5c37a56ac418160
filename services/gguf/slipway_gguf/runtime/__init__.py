"""Run a GGUF file with llama.cpp on the CPU, for validation."""

from slipway_gguf.runtime.beside import load as load_beside
from slipway_gguf.runtime.model import load

__all__ = ["load", "load_beside"]
