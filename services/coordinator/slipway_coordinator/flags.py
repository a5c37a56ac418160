"""The coordinator's command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from slipway.security.flags import at_least
from slipway.service_flags import service_parser
from slipway.texts import number_of


def coordinator_parser(prog: str) -> argparse.ArgumentParser:
    """Return the argument parser for a program of this name."""
    parser = service_parser(
        prog,
        "Carries out exports.",
        "--state state.db",
        "migrate --state postgresql://slipway@db/slipway",
        listen="127.0.0.1:7070",
        listens_for="clients and workers",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["serve", "migrate"],
        default="serve",
        help="serve (the default), or bring the tables of a PostgreSQL state up to date and end",
    )
    place = os.environ.get("SLIPWAY_STATE", "")
    parser.add_argument(
        "--state",
        default=place or None,
        required=not place,
        metavar="PLACE",
        help="SQLite file, or postgresql://USER@HOST/DATABASE; by default SLIPWAY_STATE, which ps does not show",
    )
    parser.add_argument(
        "--recovery-rules", type=Path, metavar="FILE", help="recovery table; by default the built-in one"
    )
    parser.add_argument(
        "--lease-seconds",
        type=at_least(1.0),
        default=30.0,
        metavar="N",
        help="seconds of silence after which a worker loses its tasks (%(default)g)",
    )
    parser.add_argument(
        "--max-exports",
        type=at_least(1),
        default=10_000,
        metavar="N",
        help="exports that may be under way; more are refused (%(default)s)",
    )
    parser.add_argument(
        "--retain-days",
        type=at_least(0.0),
        metavar="N",
        help="forget exports this many days after their end; never by default",
    )
    parser.add_argument(
        "--token-listen",
        default="",
        metavar="HOST:PORT",
        help="second TLS port, for clients with a token and no certificate; use the same port on all coordinators of a state",
    )
    parser.add_argument(
        "--advertise",
        type=_address,
        metavar="HOST:PORT",
        help="address at which standbys reach this process alone; by default that of --listen, or of this machine",
    )
    parser.add_argument("--allow-anonymous", action="store_true", help="accept every caller that reaches the address")
    return parser


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    try:
        host.encode("idna")  # a standby resolves the name this way
    except UnicodeError:
        host = ""
    if not host or not number_of(port, most=65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text
