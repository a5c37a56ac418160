"""Certificates, tokens, roles and limits of servers and clients."""
