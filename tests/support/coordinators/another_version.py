"""Run the coordinator's process as if its workflows had another version, whose steps cannot replay those of this one.

Usage: ``python another_version.py VERSION ARGUMENT…``. Only two things change with the version: its name, and the name
of its step.
"""

from __future__ import annotations

import sys

from dbos import DBOS

from slipway_coordinator.server import main
from slipway_coordinator.service import coordinator_parser
from slipway_coordinator.workflow import engine, workflow

if __name__ == "__main__":
    version, *arguments = sys.argv[1:]
    engine.WORKFLOW_VERSION = version
    step = workflow._decide.__wrapped__  # type: ignore[attr-defined]
    workflow._decide = DBOS.step(name=f"decide.{version}")(step)
    raise SystemExit(main(coordinator_parser("another_version").parse_args(arguments)))
