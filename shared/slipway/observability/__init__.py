"""Logs without secrets, OpenTelemetry spans and Prometheus metrics."""
