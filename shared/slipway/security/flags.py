"""Flags of servers; they take names of files, never secrets, which ``ps`` would show, and numbers within their limits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipway.settings.security import Security

Number = TypeVar("Number", int, float)

_FLAGS = {
    "tls_ca_file": "authorities of the other ends' certificates; connections without one are refused",
    "tls_cert_file": "this process's certificate with its chain (PEM)",
    "tls_key_file": "its key (PEM)",
    "access_file": "who may call: names, roles, projects, hashes of tokens",
}


def add_flags(parser: argparse.ArgumentParser, *, token: bool = False) -> None:
    """Add the flags of a server; ``token`` for one that calls others too."""
    group = parser.add_argument_group("security", "Each is SLIPWAY_… too. Files are read again when they change.")
    for name, meaning in _FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="FILE", help=meaning)
    if token:
        group.add_argument("--token-file", type=Path, metavar="FILE", help="token to show to the coordinator")
    group.add_argument(
        "--health-listen", default="", metavar="HOST:PORT", help="plain port for probes, which answers nothing else"
    )


def at_least(least: Number) -> Callable[[str], Number]:
    """For ``type=`` of a flag: a number of the kind of ``least``, and no smaller."""

    def read(text: str) -> Number:
        kind = type(least)
        try:
            number = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from error
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least} or more")
        return number

    return read


def examples(*lines: str) -> str:
    """For ``epilog=`` of a parser that formats none of its texts."""
    return "\n".join(["Examples:", *(f"  $ {line}" for line in lines)])


def given(arguments: argparse.Namespace, security: Security) -> Security:
    """Settings from the environment, with flags in their place."""
    return security.replacing(**{name: getattr(arguments, name, None) for name in (*_FLAGS, "token_file")})
