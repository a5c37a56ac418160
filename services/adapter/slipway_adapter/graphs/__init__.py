"""Graphs of the base that take an adapter's factors as inputs."""
