"""An export as data: records, states, transitions and recovery. Pure."""
