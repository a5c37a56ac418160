"""Processes with numeric libraries: how Python is started, variables set for a while, and threads.

Python starts without importing from the current folder, which may be a checkpoint with code. Some libraries have no other setting
than a variable of the environment. Their threads get a number, and sleep while they wait.

By default, threads that wait for each other spin: a finished thread burns its core until the others have finished too. If another
process uses one of the cores, or a container's quota is used up, the waiting threads take the time that the last one needs: training
the sample beside one busy process was 30 times slower. Sleeping costs only microseconds at each hand-over.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_SLEEPING: Mapping[str, str] = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Every OpenMP runtime (GNU's in torch for Linux, LLVM's elsewhere) reads this once, when it is loaded."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python; its import path lacks the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextmanager
def set_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process within a block, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def thread_variables(threads: int, *, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process with numeric libraries starts with.

    Args:
        threads: Threads of each library.
        environment: The process's other variables; a wait policy set there is kept.
    """
    return {**dict.fromkeys(_THREAD_COUNTS, str(threads)), **_missing_variables(environment)}


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Let the threads of an OpenMP runtime loaded within the block sleep; restore the environment afterwards.

    For a process that computes itself. A runtime loaded before is not affected.
    """
    added = _missing_variables(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def session_options(threads: int, *, mapped: bool = False) -> SessionOptions:
    """Return options of an ONNX Runtime session with this many threads, which sleep while they wait.

    With ``mapped``, weights stay in their file. Otherwise the runtime keeps a copy of most of them in the order of its kernels: at
    0.6 billion weights in float32 that takes 2.4 GB and three core seconds, and makes each call a sixth faster.
    """
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, threads)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors
    if mapped:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in _SLEEPING.items() if name not in environment}
