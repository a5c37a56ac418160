"""Servers on loopback: S3, PostgreSQL, a hub, credentials, OTLP; proxies that misbehave; ports and certificates."""
