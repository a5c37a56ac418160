"""This machine: what a container may use of it, its GPUs, how processes start, what can run here."""
