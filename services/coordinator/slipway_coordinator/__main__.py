"""``python -m slipway_coordinator --listen HOST:PORT --state FILE``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from slipway.errors import ModelExportError
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.recovery import DEFAULT_RULES, load_rules
from slipway_coordinator.server import serve


def main() -> int:
    """Run a coordinator; the exit code is that of the error that ended it, or 0."""
    parser = argparse.ArgumentParser(prog="python -m slipway_coordinator", description="Carries out exports.")
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="address to serve on")
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="SQLite file of all state")
    parser.add_argument("--recovery-rules", type=Path, default=DEFAULT_RULES, metavar="FILE", help="recovery table")
    parser.add_argument("--lease-seconds", type=float, default=30.0, help="silence after which a worker is given up")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        options = CoordinatorOptions(
            state=arguments.state.resolve(),
            lease_seconds=arguments.lease_seconds,
            rules=load_rules(arguments.recovery_rules),
        )
        asyncio.run(serve(options, address=arguments.listen))
    except ModelExportError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.failure().exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
