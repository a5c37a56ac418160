"""An export as data: records, their states, how they change, and what follows a failure. Pure."""
