"""The worker's command line."""

from __future__ import annotations

import argparse

from slipway.security.flags import at_least
from slipway.service_flags import service_parser


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
    return parser
