"""Values of a ``config.json`` or ``adapter_config.json`` that nobody has checked."""
