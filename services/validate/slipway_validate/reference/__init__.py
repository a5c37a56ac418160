"""The reference: base + adapter, run once, and kept as an artifact that every validation of the adapter uses."""
