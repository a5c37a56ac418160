"""Webhooks: events of exports sent to the receivers that the operator names, each until it has arrived."""
