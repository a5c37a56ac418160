"""The API server of the tests, for the engine of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.jobs_api import JobsApi, jobs_api, worker_deployment, write_kubeconfig


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobsApi]:
    """A namespace with one template, the context ``tests`` of KUBECONFIG."""
    from slipway.engines.kubernetes import following

    monkeypatch.setattr(following, "_FIRST_PAUSE", 0.02)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with jobs_api() as api:
        write_kubeconfig(tmp_path / "config", api.address)
        api.put("deployments", worker_deployment())
        yield api
