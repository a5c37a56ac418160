"""Transfers of content through the coordinator: limits, speed and fair turns."""
