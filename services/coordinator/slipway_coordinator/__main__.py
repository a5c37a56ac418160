"""``python -m slipway_coordinator --listen HOST:PORT --state FILE``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from slipway.errors import ModelExportError
from slipway.logs import add_log_options, configure_service_logs
from slipway.metrics import serving
from slipway.settings import Settings
from slipway.telemetry import tracing
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.recovery import DEFAULT_RULES, load_rules
from slipway_coordinator.server import serve

log = logging.getLogger("slipway.coordinator")


def main() -> int:
    """Run a coordinator; the exit code is that of the error that ended it, or 0."""
    parser = argparse.ArgumentParser(prog="python -m slipway_coordinator", description="Carries out exports.")
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="address to serve on")
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="SQLite file of all state")
    parser.add_argument("--recovery-rules", type=Path, default=DEFAULT_RULES, metavar="FILE", help="recovery table")
    parser.add_argument("--lease-seconds", type=float, default=30.0, help="silence after which a worker is given up")
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="serve Prometheus metrics here; off by default"
    )
    add_log_options(parser)
    arguments = parser.parse_args()
    configure_service_logs(arguments.log_level, form=arguments.log_format)
    try:
        options = CoordinatorOptions(
            state=arguments.state.resolve(),
            lease_seconds=arguments.lease_seconds,
            rules=load_rules(arguments.recovery_rules),
        )
        settings = Settings.from_environment(os.environ)
        with tracing(settings, service="slipway-coordinator"), serving(arguments.metrics) as port:
            if port:
                log.info(f"metrics on port {port}")
            asyncio.run(serve(options, address=arguments.listen))
    except ModelExportError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.failure().exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
