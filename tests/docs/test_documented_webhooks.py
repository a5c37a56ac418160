"""The receiver, the request and the file of webhooks that the documentation shows."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from slipway_coordinator.webhooks.cloud_events import TYPE_PREFIX, EventType
from slipway_coordinator.webhooks.receivers import Entry, load_webhooks
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for
from support.coordinators.http_places import call
from support.servers.free_ports import free_port
from support.servers.webhook_receiver import SECRET, webhooks_file

DOCS = Path(__file__).parents[2] / "docs"
CLIENTS = (DOCS / "clients.md").read_text().partition("## Webhooks\n")[2].partition("\n## ")[0]
OPERATIONS = (DOCS / "operations.md").read_text().partition("## Webhooks\n")[2].partition("\n## ")[0]
(RECEIVER,) = re.findall(r"```python\n(.*?)```", CLIENTS, re.DOTALL)
(REQUEST,) = re.findall(r"```http\n(.*?)```", CLIENTS, re.DOTALL)
(FILE,) = re.findall(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL)
(COMMAND,) = re.findall(r"^\$ (.*)$", OPERATIONS, re.MULTILINE)


def test_the_documented_receiver_takes_events_and_refuses_others(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "receiver.py").write_text(RECEIVER.replace("9000", str(port)))
    environment = {**os.environ, "WEBHOOK_SECRET": SECRET}
    entry = {"name": "portal", "url": f"http://localhost:{port}/hook", "secret_file": "secret"}
    with (tmp_path / "out").open("wb") as out:
        started = [sys.executable, "-P", str(tmp_path / "receiver.py")]
        running = subprocess.Popen(started, env=environment, stdout=out, stderr=subprocess.DEVNULL)
        try:
            home = tmp_path / "home"
            home.mkdir()
            with Harness(home, with_worker=False, webhooks=webhooks_file(tmp_path, entry)) as place:
                place.submit(tiny_export("x", tiny_task("m")))
                wait_for(lambda: state(place.client.get_export("x")) == "running")
                place.client.cancel_export("x")
                wait_for(lambda: len(told(tmp_path)) == 3)
            forged = {"webhook_id": "a", "webhook_timestamp": str(int(time.time()))}
            for signature in ("v1,AAAA", "none", ""):
                answer = call(f"127.0.0.1:{port}", "POST", "/hook", b"{}", **forged, webhook_signature=signature)
                assert answer.status == 401
            for length in ("-1", "65537", "9" * 5000, "²", "a"):
                assert status_of(port, f"Content-Length: {length}\r\n") == 413
            assert status_of(port, "") == 401, "no body"
        finally:
            running.terminate()
            running.wait(60)
    name = "projects/default/exports/x"
    assert told(tmp_path) == [
        f"dev.slipway.export.created {name} EXPORT_STATE_QUEUED",
        f"dev.slipway.export.started {name} EXPORT_STATE_RUNNING",
        f"dev.slipway.export.cancelled {name} EXPORT_STATE_CANCELLED",
    ]


def status_of(port: int, headers: str) -> int:
    """The status of the response to a request without the body that it promises."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"POST /hook HTTP/1.1\r\nHost: a\r\n{headers}\r\n".encode())
        return int(connection.recv(100).split()[1])


def told(folder: Path) -> list[str]:
    return (folder / "out").read_text().splitlines()


def test_the_documented_request_is_a_cloud_event() -> None:
    head, _, body = REQUEST.partition("\n\n")
    headers = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    event = from_http_event(HTTPMessage({name.lower(): value for name, value in headers.items()}, body.encode()))
    assert event.get_id() == headers["Webhook-Id"]
    assert event.get_data() == json.loads(body)["data"]
    assert event.get_type() in {TYPE_PREFIX + kind.value for kind in EventType}


def test_the_documented_file_and_secret_are_taken(tmp_path: Path) -> None:
    subprocess.run(["sh", "-c", COMMAND], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "portal.secret").stat().st_mode & 0o077 == 0
    (tmp_path / "webhooks.yaml").write_text(FILE)
    (receiver,) = load_webhooks(tmp_path / "webhooks.yaml").receivers
    assert receiver.entry.projects == {"research"}
    entry = yaml.safe_load(FILE)["receivers"][0]
    shown = set(entry) | set(re.findall(r"^\| `(\w+)` \|", OPERATIONS, re.MULTILINE)) | {"allow_http"}
    assert shown == set(Entry.model_fields)


def test_every_event_is_documented() -> None:
    for kind in EventType:
        ending = kind.value.removeprefix("export")
        assert f"`export{ending}`" in OPERATIONS or f"`{ending}`" in OPERATIONS
        assert f"`{TYPE_PREFIX}export{ending}`" in CLIENTS or f"`{ending}`" in CLIENTS
