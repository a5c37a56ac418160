"""Check the values of a ``config.json`` or ``adapter_config.json``."""
