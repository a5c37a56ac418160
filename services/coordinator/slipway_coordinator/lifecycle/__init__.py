"""The life of an export as data: records, states, transitions and recovery. Pure."""
