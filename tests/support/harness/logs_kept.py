"""Undo a block's changes to the product's loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logs_kept() -> Iterator[None]:
    """Restore the product's loggers after the block."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "slipway"]
    before = {
        logger: (logger.level, logger.propagate, list(logger.handlers))
        for logger in map(
            logging.getLogger, ["slipway", "slipway.audit", "slipway.coordinator", "slipway.worker", *names]
        )
    }
    try:
        yield
    finally:
        for logger, (level, propagate, handlers) in before.items():
            logger.setLevel(level)
            logger.propagate = propagate
            logger.handlers[:] = handlers
