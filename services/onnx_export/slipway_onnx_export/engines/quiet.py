"""Keep the notes that libraries make about their own work out of the stage's log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let only errors of the export libraries pass, and none of their warnings."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
