"""The entry point of the engine: it imports nothing of Ray."""

from __future__ import annotations

import os

from slipway.contracts.engine import Engine, EngineService, WorkerStart
from slipway.distribution import require
from slipway.errors import ServiceError

ADDRESS = "RAY_ADDRESS"


def check(address: str) -> None:
    """Check that Ray is installed, and that an address is named.

    Raises:
        ServiceError: ``UNSUPPORTED`` or ``ENGINE_UNAVAILABLE``.
    """
    require("ray", what="the engine ray")
    if not cluster_address(address):
        raise ServiceError(
            "no Ray cluster is named",
            reason="ENGINE_UNAVAILABLE",
            remedy=f"set {ADDRESS}, or give --engine ray:HOST:PORT; ray:auto is the cluster of this machine",
            about={"key": ADDRESS},
        )


def open_engine(address: str, worker: WorkerStart) -> Engine:
    """As :attr:`~slipway.contracts.engine.EngineService.open`."""
    from slipway.engines.ray.engine import RayEngine
    from slipway.engines.ray.options import load_stage_options

    return RayEngine(cluster_address(address), worker, options=load_stage_options(os.environ))


def cluster_address(address: str) -> str:
    """Return the address for ``ray.init``."""
    return address or os.environ.get(ADDRESS, "")


SERVICE = EngineService(open=open_engine, check=check)
