"""Who calls and what they may do: the access file, tokens, roles, the audit log."""
