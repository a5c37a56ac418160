"""Command lines of coordinator and worker: shared flags, the worker's own, and the handling of errors.

Security flags take names of files, never secrets, which ``ps`` would show.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipway.errors import ModelExportError
from slipway.observability.logs import add_log_options, configure_service_logs
from slipway.settings.security import Security
from slipway.texts import printable

Number = TypeVar("Number", int, float)

_SECURITY_FLAGS = {
    "tls_ca_file": "authorities (PEM) of the peers' certificates; peers without a certificate are refused",
    "tls_cert_file": "this process's certificate with its chain (PEM)",
    "tls_key_file": "its key (PEM)",
    "access_file": "who may call: principals, issuers of tokens, and limits of projects",
}


def service_parser(
    prog: str, description: str, *lines: str, listen: str, listens_for: str, token: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the flags of every service.

    Args:
        prog: Name of the command, as it was called.
        description: Description of the service.
        lines: Arguments of the examples.
        listen: Default of ``--listen``.
        listens_for: The calls that come to that address, for the help.
        token: Whether the service presents a token to others.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples(*(f"{prog} {line}" for line in lines)),
    )
    parser.add_argument(
        "--listen", default=listen, metavar="HOST:PORT", help=f"address for {listens_for} (%(default)s)"
    )
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="serve Prometheus metrics here; off by default"
    )
    add_log_options(parser)
    add_security_flags(parser, token=token)
    return parser


def run_service(arguments: argparse.Namespace, serve: Callable[[argparse.Namespace], None]) -> int:
    """Run a service until it ends; return 0, the exit code of the error that ended it, or 1 for an unexpected exception."""
    configure_service_logs(arguments.log_level, form=arguments.log_format)
    try:
        serve(arguments)
    except ModelExportError as error:
        print(printable(f"{error.reason}: {error}"), file=sys.stderr)
        return error.failure().exit_code
    except Exception:
        logging.getLogger("slipway").exception("ended by an unexpected error")
        return 1
    return 0


def add_security_flags(parser: argparse.ArgumentParser, *, token: bool = False) -> None:
    """Add the security flags of a server; with ``token`` also that of its own token."""
    group = parser.add_argument_group("security", "Each is SLIPWAY_… too. Files are read again when they change.")
    for name, meaning in _SECURITY_FLAGS.items():
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


def with_security_flags(arguments: argparse.Namespace, security: Security) -> Security:
    """Return the settings of the environment, replaced by given flags."""
    return security.with_files(**{name: getattr(arguments, name, None) for name in (*_SECURITY_FLAGS, "token_file")})


def worker_parser(prog: str) -> argparse.ArgumentParser:
    """Return the argument parser for a program of this name."""
    parser = service_parser(
        prog,
        "Runs stages for a coordinator.",
        "--coordinator coordinator:7070",
        "--coordinator coordinator:7070 --stage combine,merge --slots 2",
        listen="127.0.0.1:0",
        listens_for="direct calls and health",
        token=True,
    )
    parser.add_argument(
        "--stage", default="", metavar="NAME[,NAME…]", help="stages to run; by default all installed ones"
    )
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="by default SLIPWAY_COORDINATOR")
    parser.add_argument(
        "--slots",
        type=at_least(1),
        metavar="N",
        help="tasks at the same time; by default 2, or 1 with a single core or a GPU",
    )
    parser.add_argument(
        "--drain-seconds",
        type=at_least(0.0),
        default=20.0,
        metavar="N",
        help="seconds for running tasks after SIGTERM (%(default)g)",
    )
    group = parser.add_argument_group("engines", "How an engine starts a worker for one task.")
    group.add_argument(
        "--once", default="", metavar="EXPORT:TASK:ATTEMPT", help="take only this attempt of a task, and end after it"
    )
    group.add_argument(
        "--submission",
        default="",
        metavar="NAME",
        help="name of this start at the engine; the worker's name begins with it",
    )
    group.add_argument("--cores", type=at_least(1), metavar="N", help="cores to use; by default all usable ones")
    group.add_argument(
        "--memory-bytes", type=at_least(1), metavar="N", help="memory to use; by default what is free at the start"
    )
    return parser
