"""A real MLflow server on loopback, from an environment of its own: it brings dozens of packages that nothing else needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.coordinators.own_environments import VARIABLE
from support.servers.free_ports import free_port

MLFLOW = Path(os.environ.get(VARIABLE, "/nonexistent"), "mlflow", "bin", "mlflow")
needs_mlflow = pytest.mark.skipif(
    not MLFLOW.exists(), reason=f"{VARIABLE} names no folder with an environment mlflow (pip install mlflow)"
)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run a server that ends with the context; yield its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port),
             "--backend-store-uri", f"sqlite:///{folder}/state.db", "--artifacts-destination", str(folder / "artifacts"),
             "--workers", "1"],
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": "", "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"MLflow does not start: {(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its workers are processes of its group
        process.wait()
