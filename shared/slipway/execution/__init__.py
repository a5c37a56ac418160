"""Running one stage in a child process, so that nothing it does can end or corrupt the process that asked for it."""
