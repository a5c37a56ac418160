"""The process in which :mod:`slipway.models.module_patterns` tests expressions; it imports nothing of Slipway.

Standard input has seconds, expressions and names as JSON. The process writes each expression's number to standard output before it
matches it, the error if there is one, and ``done`` at the end.
"""

import json
import os
import re
import resource
import signal
import sys
import warnings

_MEMORY = 1 << 30


def main() -> None:
    """Match every expression against every name; the kernel ends this process when its time is over."""
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # about expressions that a later Python will read differently
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    names = request["names"]
    for place, method, expression, required in request["expressions"]:
        os.write(1, f"{place}\n".encode())
        try:
            match = getattr(re.compile(expression), method)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            if required:
                said = " ".join(str(error).split())[:200] or type(error).__name__  # its message may have line ends
                os.write(1, f"{place} {said}\n".encode(errors="replace"))
                return
            continue
        for name in names:
            match(name)
    os.write(1, b"done\n")


main()
