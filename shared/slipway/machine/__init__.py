"""This machine: a container's limits, GPUs, how processes start, what can run here."""
