"""From a configuration to tasks: the plan, which workers a task is for, and whether it fits this machine."""
