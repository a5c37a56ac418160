"""Tokens of an issuer at a coordinator process: clients, a worker, rotated tokens and keys, and what its log says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.settings.security import Security
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.servers.free_ports import free_port
from support.servers.metrics_page import page
from support.servers.oidc_issuer import AUDIENCE, OidcIssuer, oidc_issuer

SERVICE_ACCOUNT = "system:serviceaccount:slipway:merge"
KUBERNETES = {"kubernetes.io": {"namespace": "slipway", "serviceaccount": {"name": "merge", "uid": "1"}}}
RULES: list[dict[str, Any]] = [
    {
        "claims": {"/kubernetes.io/serviceaccount/name": "merge", "/kubernetes.io/namespace": "slipway"},
        "role": "worker",
    },
    {"claims": {"groups": "red"}, "role": "operator", "projects": ["red"]},
]


class Place:
    """A coordinator process that knows its callers by an issuer alone."""

    def __init__(self, home: Path, issuer: OidcIssuer, stack: ExitStack) -> None:
        self.home, self.issuer, self.stack = home, issuer, stack
        self.address = f"127.0.0.1:{free_port()}"
        entry = {"name": "id", "issuer": issuer.url, "audiences": [AUDIENCE], "refresh_seconds": 1, "rules": RULES}
        (home / "access.yaml").write_text(yaml.safe_dump({"issuers": [entry]}))
        self.log = home / "coordinator.log"
        command = [SLIPWAY, "coordinator", "--listen", self.address, "--state", str(home / "state.db")]
        command += ["--access-file", str(home / "access.yaml"), "--log-format", "json"]
        self.metrics = free_port()
        command += ["--metrics", f"127.0.0.1:{self.metrics}"]
        self.coordinator = stack.enter_context(process(command, self.log, SLIPWAY_HOME=str(home)))

    def write_token(self, name: str = "alice", **claims: Any) -> Path:
        path = self.home / f"{name}.token"
        path.write_text(self.issuer.token(**{"groups": ["red"], **claims}) + "\n")
        return path

    def client(self, token: Path) -> Client:
        return Client(self.address, security=Security(token_file=token), project="red")

    def worker(self, token: Path) -> None:
        command = [SLIPWAY, "worker", "--coordinator", self.address, "--stage", "support.stages.watched:STAGE"]
        command += ["--token-file", str(token), "--drain-seconds", "0"]
        self.stack.enter_context(process(command, self.home / "worker.log", SLIPWAY_HOME=str(self.home)))

    def audited(self) -> list[dict[str, str]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line["audit"] for line in lines if "audit" in line]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with oidc_issuer() as issuer, ExitStack() as stack:
        yield Place(tmp_path, issuer, stack)


def reason(client: Client) -> str:
    try:
        list(client.list_exports())
    except ModelExportError as error:
        return error.reason
    return "listed"


def test_callers_are_known_by_their_tokens_alone(place: Place) -> None:
    place.issuer.changes["/keys"] = 503  # down at the start
    token = place.write_token()
    with place.client(token) as client:
        wait_for(lambda: reason(client) == "ISSUER_UNAVAILABLE", seconds=240)
        assert place.coordinator.poll() is None
        place.issuer.changes.clear()
        wait_for(lambda: reason(client) == "listed")
        with pytest.raises(ModelExportError, match="there is no export"):
            client.cancel_export("none")
        assert len(place.write_token(padding="x" * 5700).read_text()) > 7500
        assert [reason(client) for _ in range(20)] == ["listed"] * 20
    (line,) = wait_for(place.audited)
    assert (line["principal"], line["issuer"], line["subject"]) == ("id:alice", place.issuer.url, "alice")
    measured = page(place.metrics)
    listed = ("method", "slipway.v1.ExportService/ListExports")
    assert measured["slipway_calls_total", (("code", "UNAVAILABLE"), listed)] >= 1
    assert measured["slipway_calls_total", (("code", "OK"), listed)] >= 1
    assert measured["slipway_call_duration_seconds_count", (listed,)] >= 2
    (version,) = [labels for name, labels in measured if name == "slipway_build_info"]
    assert dict(version)["version"]


@pytest.mark.slow
def test_tokens_and_keys_rotate_under_a_client_and_a_worker(place: Place) -> None:
    token = place.write_token()
    worker = place.write_token("worker", sub=SERVICE_ACCOUNT, groups=[], **KUBERNETES)
    tokens = [token.read_text(), worker.read_text()]
    place.worker(worker)
    with place.client(token) as client:
        wait_for(lambda: reason(client) == "listed", seconds=240)
        wait_for(
            lambda: any(name == "slipway_workers" and on for (name, _), on in page(place.metrics).items()), seconds=240
        )
        place.write_token(exp=int(time.time()) - 100)
        assert reason(client) == "UNAUTHENTICATED"
        place.write_token(groups="blue")
        assert reason(client) == "PERMISSION_DENIED"
        place.issuer.rotate("second")
        place.write_token()
        worker.write_text(place.issuer.token(sub=SERVICE_ACCOUNT, **KUBERNETES))
        wait_for(lambda: reason(client) == "listed")
        tokens += [token.read_text(), worker.read_text()]
    logs = place.log.read_text() + (place.home / "worker.log").read_text()
    assert not [each for each in tokens if each.strip() in logs or each.strip().rpartition(".")[2] in logs]
    assert place.coordinator.poll() is None
    assert "Traceback" not in logs
