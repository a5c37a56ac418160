"""Run one stage in a child process, so that the stage cannot end or corrupt the process that started it."""
