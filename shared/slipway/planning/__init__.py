"""Plan the tasks of a configuration, match tasks with workers, and check that a plan fits this machine."""
