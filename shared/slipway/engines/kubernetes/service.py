"""The entry point of the engine: it imports nothing of the client's library."""

from __future__ import annotations

import os

from slipway.contracts.engine import Engine, EngineService, WorkerStart
from slipway.distribution import require


def check(address: str) -> None:
    """Check that the library is installed, and that an address is the name of a context that can be used; an empty one needs none.

    Raises:
        ModelExportError: ``UNSUPPORTED``, ``ENGINE_UNAVAILABLE`` or ``CONFIGURATION_INVALID``.
    """
    require("kubernetes", what="the engine kubernetes")
    from slipway.engines.kubernetes.cluster import open_cluster
    from slipway.engines.kubernetes.options import JobOptions

    open_cluster(address, os.environ)
    JobOptions.from_environment(os.environ)


def open_engine(address: str, worker: WorkerStart) -> Engine:
    """As :attr:`~slipway.contracts.engine.EngineService.open`."""
    from slipway.engines.kubernetes.cluster import open_cluster
    from slipway.engines.kubernetes.engine import KubernetesEngine
    from slipway.engines.kubernetes.options import JobOptions

    return KubernetesEngine(open_cluster(address, os.environ), worker, options=JobOptions.from_environment(os.environ))


def installation() -> str:
    """As :attr:`~slipway.contracts.engine.EngineService.installation`."""
    from slipway.engines.kubernetes.options import JobOptions

    return JobOptions.from_environment(os.environ).instance


SERVICE = EngineService(open=open_engine, check=check, has_templates=True, installation=installation)
