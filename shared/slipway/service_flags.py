"""Common parts of the command lines of coordinator and worker: shared flags, and the handling of errors."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from slipway.errors import ModelExportError
from slipway.observability.logs import add_log_options, configure_service_logs
from slipway.security.flags import add_flags, examples
from slipway.texts import printable


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
    add_flags(parser, token=token)
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
