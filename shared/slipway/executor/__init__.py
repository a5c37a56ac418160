"""Running one stage in a child process, so that nothing it does can end or corrupt the process that asked for it."""

from slipway.executor.process import Execution, Outcome, execute

__all__ = ["Execution", "Outcome", "execute"]
