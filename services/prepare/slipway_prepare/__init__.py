"""Prepare service: it writes a base model in any supported format as plain 16- or 32-bit safetensors."""
