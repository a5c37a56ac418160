"""The process of :class:`~slipway.machine.bounded.process.BoundedProcess`: ``child MODULE:FUNCTION SECONDS MEMORY_BYTES MODULE…``.

Each line of standard input has a call's arguments as a JSON list. The answer is a line with the ``value``, or lines with each ``item`` and one
with ``end``, or one with what is ``refused``. When the time of a call is over, the kernel ends this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipway.errors import ModelExportError

_SPARE_BYTES = 16 << 20
"""Memory that is freed when there is no more, so that the process can report it."""


def main(function: str, seconds: float, memory_bytes: int, imports: list[str]) -> None:
    """Answer calls until the end of the input."""
    # What the function or a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    limit_memory(memory_bytes + _SPARE_BYTES)
    spare = bytearray(_SPARE_BYTES)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            for answer in _answers(called, json.loads(line)):
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
        except MemoryError:
            del spare
            answers.write('{"memory": true}\n')
            answers.flush()
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answers(called: Any, arguments: list[Any]) -> Iterator[dict[str, Any]]:
    try:
        result = called(*arguments)
        if not isinstance(result, Iterator):
            yield {"value": result}
            return
        for item in result:
            yield {"item": item}
        yield {"end": True}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the caller gets every error
        if "MemoryError" in type(error).__name__:
            raise MemoryError from None
        yield {"refused": str(error) or type(error).__name__, **_failure(error)}


def _failure(error: Exception) -> dict[str, Any]:
    return {"failure": error.failure().to_json()} if isinstance(error, ModelExportError) else {}


def limit_memory(more_bytes: int) -> None:
    """Limit the address space to what is used now and ``more_bytes``."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + more_bytes if most == resource.RLIM_INFINITY else min(used + more_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
