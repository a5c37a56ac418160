"""Take back what a block sets up of the product's logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logs_kept() -> Iterator[None]:
    """Put the product's loggers back as they were before the block."""
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
