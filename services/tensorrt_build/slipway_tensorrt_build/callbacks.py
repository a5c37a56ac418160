"""Objects that TensorRT calls while it builds: its logger and its progress monitor.

Their base classes belong to the chosen library (``tensorrt`` or ``tensorrt_rtx``), so the classes are defined for each build.
"""

from __future__ import annotations

import logging
from typing import Any

from slipway.stage import Context

# Warnings that concern the caller of the engine; engine.json names every input's type.
_NOTES = ("has Int64 binding",)
_LONGEST = 500  # characters of a warning


def make_logger(trt: Any, ctx: Context, errors: list[str]) -> Any:
    """Return a logger that writes to the attempt's log, records warnings for the user and adds error messages to ``errors``."""
    levels = {
        trt.ILogger.Severity.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.Severity.ERROR: logging.ERROR,
        trt.ILogger.Severity.WARNING: logging.WARNING,
        trt.ILogger.Severity.INFO: logging.DEBUG,
        trt.ILogger.Severity.VERBOSE: logging.DEBUG,
    }

    class BuildLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._told: set[str] = set()

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            if level >= logging.ERROR:
                errors.append(message)
            if level == logging.WARNING:
                self._warn(f"TensorRT: {' '.join(message.split())[:_LONGEST]}")
            else:
                ctx.log.log(level, message)

        def _warn(self, message: str) -> None:
            if any(note in message for note in _NOTES):
                ctx.log.info(message)
            elif message not in self._told:
                self._told.add(message)
                ctx.warn(message)

    return BuildLogger()


def make_monitor(trt: Any, ctx: Context, *, label: str) -> Any:
    """Return a progress monitor that reports the outermost phases and stops the build when the attempt is cancelled."""

    class BuildMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self._outermost = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._outermost = phase_name
            self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if ctx.cancelled.is_set():
                return False
            if phase_name == self._outermost:
                ctx.progress(f"build {label}", done=step + 1, total=self._steps[phase_name], unit="steps")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return BuildMonitor()
