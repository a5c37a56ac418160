"""Flags of servers; they take names of files, never secrets, which ``ps`` would show."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipway.security.settings import Security

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


def given(arguments: argparse.Namespace, security: Security) -> Security:
    """Settings from the environment, with flags in their place."""
    return security.replacing(**{name: getattr(arguments, name, None) for name in (*_FLAGS, "token_file")})
