"""End a runner when the stage that started it ends, and read its memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 17


def die_with_parent() -> SimpleQueue[str]:
    """End this process when its parent ends in any way; return the queue of lines that the parent writes.

    There are two mechanisms, because each alone has a gap: the kernel's signal is tied to the thread that started us and
    exists on Linux only; the pipe, whose other end the parent holds, needs a thread that can run. Ctrl-C, which a terminal
    sends to all of its programs, is ignored here: the stage decides what is cancelled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_to_the_end, args=(lines,), name="parent-watch", daemon=True).start()
    return lines


def _read_to_the_end(lines: SimpleQueue[str]) -> None:
    with os.fdopen(0, "rb", buffering=0, closefd=False) as pipe:
        for line in pipe:
            lines.put(line.decode(errors="replace").strip())
    os._exit(EXIT_PARENT_GONE)  # no clean-up: native code may be running in the main thread


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this program so far.

    It reads ``VmHWM``, which starts at zero with each program; ``ru_maxrss`` would keep the parent's peak across exec.
    """
    return _status_bytes("VmHWM")


def rss_bytes() -> int:
    """Return the present resident memory."""
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    entry = next((line for line in lines if line.startswith(key + ":")), f"{key}: 0 kB")
    return int(entry.split()[1]) * 1024
