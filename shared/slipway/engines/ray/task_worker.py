"""The worker's process on a node: ``python -P -m slipway.engines.ray.task_worker PARENT ARGUMENT…`` runs ``slipway`` and ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_SLIPWAY = "from slipway.cli import main; main()"


def main() -> None:
    """Run the program ``slipway``; get SIGTERM when the task host ends, whatever ends it."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-P", "-c", _SLIPWAY, *arguments])  # noqa: S606 - a list of arguments, no shell


if __name__ == "__main__":
    main()
