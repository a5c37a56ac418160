"""The process of :mod:`slipway_prepare.pickles.loading`: it reads the file that its first argument names, and writes the second.

It may take as much memory, disk space and time as the file's size explains. It writes one line of JSON: an empty object, or the fault.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import signal
import struct
import sys
from pathlib import Path

_COPIES, _SPARE_BYTES = 3, 256 << 20
"""Address space beyond that of torch itself: the tensors, and what reads and writes them."""
_MORE_TO_WRITE = 16 << 20
_SECONDS, _BYTES_PER_SECOND = 60.0, 20e6
"""Time of the processor."""
_DAMAGED = (
    RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, AssertionError, OverflowError, struct.error,
)  # fmt: skip


def main() -> None:
    """Read and write within the limits."""
    source, target = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    _limit(Path(source).stat().st_size)
    sys.stdout.write(json.dumps(_rewrite(source, target)) + "\n")
    sys.stdout.flush()


def _rewrite(source: str, target: str) -> dict[str, str]:
    import torch

    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
        torch.save(loaded, target)
    except MemoryError:
        return {"fault": "memory"}
    except pickle.UnpicklingError as error:
        return {"fault": "code", "detail": str(error)[:2000]}
    except (OSError, *_DAMAGED) as error:
        said = str(error).strip() or type(error).__name__
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        fault = "disk" if full else "memory" if "allocate memory" in said else "damaged"
        return {"fault": fault, "detail": said.splitlines()[0][:200]}
    return {}


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + _MORE_TO_WRITE,) * 2)
    taken = _address_space()
    if taken is not None:
        most = taken + _COPIES * size + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, _SECONDS + size / _BYTES_PER_SECOND)


def _address_space() -> int | None:
    """Return the address space of this process in bytes; None where the kernel does not say (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
