"""An engine that is found by its name: its nodes are processes of this machine, with homes below ``SLIPWAY_TEST_STAGES``."""

from __future__ import annotations

import os
from pathlib import Path

from slipway.contracts.engine import EngineService, WorkerStart
from slipway.errors import ServiceError
from support.coordinators.process_engine import ProcessEngine


def check(address: str) -> None:
    if address == "away":
        raise ServiceError("the cluster is away", reason="ENGINE_UNAVAILABLE")


def open_engine(address: str, worker: WorkerStart) -> ProcessEngine:
    return ProcessEngine(Path(os.environ["SLIPWAY_TEST_STAGES"]) / "nodes", worker)


SERVICE = EngineService(open=open_engine, check=check)
