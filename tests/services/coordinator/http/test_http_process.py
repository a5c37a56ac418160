"""``slipway coordinator --http`` as users start it."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.coordinators.http_places import call
from support.servers.free_ports import free_port


def serving(address: str) -> bool:
    with contextlib.suppress(OSError):
        return call(address, "GET", "/healthz").status == 200
    return False


def test_a_coordinator_serves_http_and_ends_in_order(tmp_path: Path) -> None:
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    command = [SLIPWAY, "coordinator", "--listen", f"127.0.0.1:{free_port()}", "--state", str(tmp_path / "state.db")]
    with process([*command, "--http", address], log) as running:
        wait_for(lambda: serving(address) or running.poll() is not None, seconds=300)
        assert call(address, "GET", "/v1/projects/default/exports").json == {}
        with socket.create_connection(("127.0.0.1", int(address[10:]))) as idle:  # holds nothing up
            idle.sendall(b"GET / HTTP/1.1\r\n")
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
    assert "Traceback" not in log.read_text()
    with socket.create_server(("127.0.0.1", int(address[10:]))), process([*command, "--http", address], log) as second:
        assert second.wait(300) == 3
    assert "REQUEST_INVALID" in log.read_text()
