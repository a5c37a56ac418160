"""Prepare service: whatever a base model is stored as, written as plain 16- or 32-bit safetensors."""
