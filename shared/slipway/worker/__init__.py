"""The worker: leases tasks from a coordinator, runs each stage in a child process, and hands the results in."""
