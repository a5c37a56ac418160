"""Flags of servers. They take names of files, never secrets, which ``ps`` would show."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipway.settings.security import Security

Number = TypeVar("Number", int, float)

_FLAGS = {
    "tls_ca_file": "authorities (PEM) of the peers' certificates; peers without a certificate are refused",
    "tls_cert_file": "this process's certificate with its chain (PEM)",
    "tls_key_file": "its key (PEM)",
    "access_file": "who may call: names, roles, projects, hashes of tokens",
}


def add_flags(parser: argparse.ArgumentParser, *, token: bool = False) -> None:
    """Add the security flags of a server; with ``token`` also that of its own token."""
    group = parser.add_argument_group("security", "Each is SLIPWAY_… too. Files are read again when they change.")
    for name, meaning in _FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="FILE", help=meaning)
    if token:
        group.add_argument("--token-file", type=Path, metavar="FILE", help="token to show to the coordinator")
    group.add_argument(
        "--health-listen", default="", metavar="HOST:PORT", help="plain port for probes, which answers nothing else"
    )


def at_least(least: Number) -> Callable[[str], Number]:
    """Return a parser for ``type=`` of a flag: a number of the type of ``least``, at least as large."""

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
    """Return examples for ``epilog=`` of a parser that does not format its texts."""
    return "\n".join(["Examples:", *(f"  $ {line}" for line in lines)])


def with_flags(arguments: argparse.Namespace, security: Security) -> Security:
    """Return the settings of the environment, replaced by given flags."""
    return security.with_files(**{name: getattr(arguments, name, None) for name in (*_FLAGS, "token_file")})
