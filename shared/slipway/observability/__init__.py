"""What is seen of Slipway from outside: logs without secrets, OpenTelemetry spans, Prometheus metrics."""
