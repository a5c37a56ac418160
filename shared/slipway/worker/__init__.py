"""The worker: leases tasks from a coordinator, runs each stage in a child process, and hands the results in."""

from slipway.worker.pull import Worker, WorkerOptions

__all__ = ["Worker", "WorkerOptions"]
