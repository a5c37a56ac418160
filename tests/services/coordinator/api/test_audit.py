"""Who did what, from where, and how it ended: a line each, also of what was refused."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.observability.logs import JsonFormatter, PlainFormatter
from slipway.observability.telemetry import new_trace
from slipway.security.access import audit
from slipway.security.access.principals import Role
from slipway.security.access.rules import RULES
from slipway.settings.security import Security
from slipway_coordinator.workflow.periodic import forget_old
from slipway_protos.v1 import export_pb2 as pb
from support.commands.cli import run_here
from support.coordinators.artifact_places import Place
from support.coordinators.harness import CONFIGURATION, wait_for

Lines = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("audit")) as place:
        yield place


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Give the facts of so many lines, without the port that each came from."""
    caplog.set_level(logging.INFO, logger="slipway.audit")

    def written() -> list[dict[str, str]]:
        return [record.__dict__["audit"] for record in caplog.records if record.name == "slipway.audit"]

    def read(count: int) -> list[dict[str, str]]:
        assert len(written()) >= count  # a caller hears of nothing that has no line yet
        for facts in written():
            assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+|ipv6:\[::1\]:\d+", facts["peer"])
        return [{key: value for key, value in facts.items() if key != "peer"} for facts in written()]

    return read


def line(action: str, outcome: str, principal: str, resource: str) -> dict[str, str]:
    project = resource.split("/")[1] if resource else ""
    return {"action": action, "outcome": outcome, "principal": principal, "project": project, "resource": resource}


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelExportError) as caught:
        call()
    return caught.value.reason


def test_every_change_has_a_line(place: Place, lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of an artifact")
    name = "projects/red/exports/ours"
    with place.client_of("submitter") as client, place.client_of("admin", project="red") as admin:
        digest = client.push_artifact({"file": tmp_path / "file"})
        sources = {"base": digest, "adapter": digest}
        client.create_export(CONFIGURATION, sources=sources, export_id="ours", validate_only=True)
        made = client.create_export(CONFIGURATION, sources=sources, export_id="ours")
        client.cancel_export("ours")
        client.retry_export("ours")
        client.cancel_export("ours")
        client.get_export("ours")
        by, others = (client.list_exports(filter=f"creator {sign} submitter", summary=True) for sign in ("=", "!="))
        assert {one.creator for one in by if one.name == name} == {"submitter"}
        assert name not in [one.name for one in others]
        admin.delete_export("ours")
    assert made.creator == "submitter"
    artifact = f"projects/red/artifacts/{digest}"
    assert lines(8) == [
        line("CreateArtifact", "content_missing", "submitter", artifact),
        line("CreateArtifact", "done", "submitter", artifact),
        line("CreateExport", "checked", "submitter", name),
        line("CreateExport", "done", "submitter", name),
        line("CancelExport", "done", "submitter", name),
        line("RetryExport", "done", "submitter", name),
        line("CancelExport", "done", "submitter", name),
        line("DeleteExport", "done", "admin", name),
    ]


def test_every_refusal_has_a_line_with_its_reason(place: Place, lines: Lines, tmp_path: Path) -> None:
    name = "projects/red/exports/none"
    (tmp_path / "wrong").write_text("x" * 40)
    unknown = Client(place.address, security=Security(token_file=tmp_path / "wrong"), project="red")
    clients = [unknown, *(place.client_of(who, project="red") for who in ("viewer", "neighbour", "submitter"))]
    calls = [
        lambda client: client.create_export(CONFIGURATION, sources={}, export_id="none"),
        lambda client: client.cancel_export("none"),
        lambda client: client.delete_export("none"),
    ]
    found: list[str] = []
    for client in clients:
        for call in calls:
            found.append(refused(lambda: call(client)))  # noqa: B023 - called here
            assert len(lines(len(found))) == len(found)
    for client in clients:
        client.close()
    assert found[:8] == [*["UNAUTHENTICATED"] * 3, *["PERMISSION_DENIED"] * 4, "EXPORT_NOT_FOUND"]
    actions = ["CreateExport", "CancelExport", "DeleteExport"]
    assert lines(12) == [
        line(action, reason, who, name if who else "")
        for (who, action), reason in zip(
            ((who, action) for who in ("", "viewer", "neighbour", "submitter") for action in actions),
            found,
            strict=True,
        )
    ]


def test_reading_has_no_line(place: Place, lines: Lines) -> None:
    with place.client_of("viewer", project="red") as client:
        list(client.list_exports())
        assert refused(lambda: client.get_export("none")) == "EXPORT_NOT_FOUND"
    assert lines(0) == []


def test_people_see_who_created_an_export(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    (tmp_path / "file").write_text("of another artifact")
    with place.client_of("submitter") as client:
        digest = client.push_artifact({"file": tmp_path / "file"})
        client.create_export(CONFIGURATION, sources={"base": digest, "adapter": digest}, export_id="seen")
        client.cancel_export("seen")
    connection = ["--coordinator", place.address, "--project", "red", "--token-file", place.home / "submitter.token"]
    shown = {}
    for command in (["list"], ["get", "seen"], ["list", "--json"], ["list", "--filter", "creator=nobody"]):
        assert run_here(*command, *connection) == 0
        shown[" ".join(command)] = capfd.readouterr().out
    assert re.search(r"seen +cancelled.* submitter", shown["list"])
    assert "seen  cancelled, by submitter" in shown["get seen"]
    (listed,) = (one for one in json.loads(shown["list --json"])["exports"] if one["name"].endswith("/seen"))
    assert listed["creator"] == "submitter"
    assert listed["tasks"], "a program gets all of it"
    assert not shown["list --filter creator=nobody"]


HOSTILE = 'x" outcome="done\n\x1b[2J\u202e\u2028\x85 {"audit": "\ud800'


def test_hostile_text_breaks_no_line(place: Place, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    request = pb.CreateExportRequest(parent="projects/red", export_id=HOSTILE[:-1])
    with place.client_of("submitter") as client, pytest.raises(grpc.RpcError):
        client._calls.exports.CreateExport(request, metadata=client._calls.metadata())
    (facts,) = lines(1)
    assert (facts["outcome"], facts["principal"], facts["project"]) == ("REQUEST_INVALID", "submitter", "red")
    audit.write("CreateExport", outcome="done", principal=HOSTILE, resource=f"projects/{HOSTILE}", peer=HOSTILE)
    records = [record for record in caplog.records if record.name == "slipway.audit"]
    assert len(records) == 2
    for formatter in (JsonFormatter(), PlainFormatter(), logging.Formatter("%(name)s %(message)s")):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        for record in records:
            handler.handle(record)
        written = stream.getvalue()
        assert len(written.splitlines()) == 2
        assert written.replace("\n", "").isprintable()
        for text in written.splitlines():
            message = json.loads(text)["message"] if text.startswith("{") else text
            values = re.findall(r'([a-z]+)=("(?:[^"\\]|\\.)*")', message)
            assert [key for key, _ in values] == ["action", "outcome", "principal", "project", "resource", "peer"]
            assert json.loads(dict(values)["action"]) == "CreateExport"


def test_every_method_that_changes_something_is_audited() -> None:
    changing = {method for method, rule in RULES.items() if rule.roles and not rule.roles & {Role.VIEWER, Role.WORKER}}
    # Content without an artifact is nothing yet.
    assert changing - audit.AUDITED == {f"/slipway.v1.ArtifactService/{name}" for name in ("GetUpload", "WriteBlob")}
    assert changing >= audit.AUDITED


def test_what_the_coordinator_forgets_by_itself_has_a_line(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.client_of("admin", project="red") as client:
        client.create_export(
            CONFIGURATION, sources={"base": "sha256:" + "0" * 64, "adapter": "sha256:" + "0" * 64}, export_id="old"
        )
        client.cancel_export("old")
        wait_for(lambda: client.get_export("old").HasField("end_time"))
    caplog.set_level(logging.INFO, logger="slipway.audit")
    place.run(lambda: forget_old(place.server.coordinator, days=0))
    forgotten = [one.__dict__["audit"] for one in caplog.records if one.name == "slipway.audit"]
    assert line("DeleteExport", "done", "(--retain-days)", "projects/red/exports/old") | {"peer": ""} in forgotten


SERVICE = """
from slipway.observability.logs import configure_service_logs
from slipway.security.access import audit
for form in ("json", "text"):
    configure_service_logs("ERROR", form=form)
    audit.write("CancelExport", outcome="done", principal="ci", resource="projects/red/exports/e", peer="ipv4:10.0.0.7:99",
        traceparent="TRACE")
"""


def test_a_service_writes_it_at_every_level() -> None:
    trace = new_trace()
    command = [sys.executable, "-c", SERVICE.replace("TRACE", trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document, text = done.stderr.splitlines()
    facts = line("CancelExport", "done", "ci", "projects/red/exports/e") | {"peer": "ipv4:10.0.0.7:99"}
    assert (json.loads(document)["logger"], json.loads(document)["audit"]) == ("slipway.audit", facts)
    assert json.loads(document)["trace_id"] == trace.split("-")[1]
    assert text.endswith(
        'INFO slipway.audit action="CancelExport" outcome="done" principal="ci" project="red"'
        ' resource="projects/red/exports/e" peer="ipv4:10.0.0.7:99"'
    )
