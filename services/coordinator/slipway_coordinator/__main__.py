"""``python -m slipway_coordinator --listen HOST:PORT --state PLACE``, and ``python -m slipway_coordinator migrate --state PLACE``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from pathlib import Path

from slipway.artifacts.opening import open_store
from slipway.errors import ModelExportError
from slipway.logs import add_log_options, configure_service_logs
from slipway.metrics import serving
from slipway.security.flags import add_flags, at_least, examples, given
from slipway.security.server import coordinator_security
from slipway.security.settings import Security
from slipway.settings import Settings
from slipway.telemetry import tracing
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.migration import migrate
from slipway_coordinator.recovery import DEFAULT_RULES, load_rules
from slipway_coordinator.server import serve
from slipway_coordinator.state import state_at

log = logging.getLogger("slipway.coordinator")


def main() -> int:
    """Run a coordinator; the exit code is that of the error that ended it, or 0."""
    arguments = _parser().parse_args()
    configure_service_logs(arguments.log_level, form=arguments.log_format)
    try:
        state = state_at(arguments.state)
        if arguments.command == "migrate":
            migrate(state)
            return 0
        settings = Settings.from_environment(os.environ)
        options = CoordinatorOptions(
            state=state,
            lease_seconds=arguments.lease_seconds,
            max_unended=arguments.max_exports,
            upload_bytes=settings.upload_bytes,
            open_uploads=settings.open_uploads,
            retain_days=arguments.retain_days,
            rules=load_rules(arguments.recovery_rules),
        )
        security = coordinator_security(
            given(arguments, Security.from_environment(os.environ)),
            address=arguments.listen,
            health_address=arguments.health_listen,
            allow_anonymous=arguments.allow_anonymous,
        )
        with tracing(settings, service="slipway-coordinator"), serving(arguments.metrics) as port:
            if port:
                log.info(f"metrics on port {port}")
            # What queued exports hold lives long; looking through all of it as often as usual stops every call meanwhile.
            gc.freeze()
            gc.set_threshold(20_000, 50, 100)
            asyncio.run(serve(options, address=arguments.listen, store=lambda: open_store(settings), security=security))
    except ModelExportError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.failure().exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipway_coordinator",
        description="Carries out exports.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples(
            "python -m slipway_coordinator --state state.db",
            "python -m slipway_coordinator migrate --state postgresql://slipway@db/slipway",
        ),
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["serve", "migrate"],
        default="serve",
        help="serve (the default), or bring the tables of a PostgreSQL state up to date and end",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="address to serve on (%(default)s)"
    )
    place = os.environ.get("SLIPWAY_STATE", "")
    parser.add_argument(
        "--state",
        default=place or None,
        required=not place,
        metavar="PLACE",
        help="SQLite file, or postgresql://USER@HOST/DATABASE; by default SLIPWAY_STATE, which ps does not show",
    )
    parser.add_argument("--recovery-rules", type=Path, default=DEFAULT_RULES, metavar="FILE", help="recovery table")
    parser.add_argument(
        "--lease-seconds",
        type=at_least(1.0),
        default=30.0,
        metavar="N",
        help="silence after which a worker is given up (%(default)g)",
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
        help="forget exports this long after their end; never by default",
    )
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="serve Prometheus metrics here; off by default"
    )
    add_log_options(parser)
    add_flags(parser)
    parser.add_argument("--allow-anonymous", action="store_true", help="let everybody in who reaches the address")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
