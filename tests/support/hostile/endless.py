"""Work without end, for processes with limits, and templates that are such work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from slipway.errors import ConfigurationError

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
HALVES = "{{ '\\ud83d' }}"


def double(number: int) -> int:
    print("not an answer")
    return 2 * number


def loop() -> None:
    while True:
        pass


def grow() -> int:
    return len(bytearray(1 << 40))


def wait() -> None:
    time.sleep(600)


def leave() -> None:
    os._exit(7)


def refuse() -> None:
    raise ConfigurationError("not so", remedy="so", about={"key": "a"})


def fail() -> None:
    raise ZeroDivisionError("by nothing")


def count(most: int) -> Iterator[int]:
    yield from range(most)


def surrogate() -> str:
    return "\ud83d"


def memory_pieces() -> Iterator[int]:
    held = []
    while True:
        held.append(bytearray(1 << 24))
        yield len(held)
