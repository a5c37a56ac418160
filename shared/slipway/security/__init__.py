"""Who may call what: certificates, tokens, roles and limits, for servers and clients alike."""
