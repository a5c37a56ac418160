"""Identify callers by tokens of OpenID Connect issuers: settings, keys, checks of a token, and rules for its claims."""
