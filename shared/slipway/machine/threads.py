"""Threads of numeric libraries: how many, and that they sleep while they wait for each other.

By default they spin: a thread that is done burns its core until the others are done too. Where another process has one of the
cores, or a container's quota is used up, the thread that is waited for gets no time, because the waiting ones have it: training the
sample beside one busy process was 30 times slower that way. Threads that sleep cost microseconds at each hand-over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_SLEEPING: Mapping[str, str] = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For every OpenMP runtime (GNU's in torch for Linux, LLVM's elsewhere), which reads it once, when it is loaded."""


def thread_variables(threads: int, *, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process with numeric libraries starts with.

    Args:
        threads: Threads of each library.
        environment: What the process gets otherwise; how its threads wait is left as it says.
    """
    return {**dict.fromkeys(_COUNTS, str(threads)), **_absent(environment)}


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Let threads sleep of the OpenMP runtime that is loaded within the context; the environment comes back after.

    For a process that computes itself. A runtime that was loaded before keeps its ways.
    """
    added = _absent(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def session_options(threads: int) -> SessionOptions:
    """Return options of an ONNX Runtime session with so many threads, which sleep while they wait."""
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, threads)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors
    return options


def _absent(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in _SLEEPING.items() if name not in environment}
