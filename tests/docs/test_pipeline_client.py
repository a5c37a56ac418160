"""The client of the examples of pipelines, ``slipway_http.py``, against a real coordinator; and that it needs the standard library alone."""

from __future__ import annotations

import ast
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands.pipeline_client import FILE, load_client
from support.coordinators.harness import Harness, wait_for
from support.coordinators.http_places import HttpPlace
from support.servers.tcp_proxy import TcpProxy

http = load_client()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPlace]:
    """A coordinator with tokens, without workers."""
    with HttpPlace(tmp_path_factory.mktemp("place")) as place:
        yield place


def client_of(place: Harness, **more: Any) -> Any:
    return http.Slipway(
        f"http://127.0.0.1:{place.server.http_port}", **{"patience_seconds": 0, "tell": lambda _: None, **more}
    )


def submitter(place: HttpPlace, **more: Any) -> Any:
    return client_of(place, project="red", token=place.tokens["submitter"], **more)


def sources(place: HttpPlace) -> dict[str, str]:
    digest = place.base()
    place.give(digest, project="red")
    return {"base": digest, "adapter": digest}


def test_it_needs_nothing_but_python() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(FILE)], env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_same_request_is_the_same_export(place: HttpPlace) -> None:
    client, given = submitter(place), sources(place)
    known = http.request_id("dag", "run 1", "über", 0)
    assert len(known) == 64
    assert known != http.request_id("dag", "run", "1 über", 0)
    name = client.submit({}, sources=given, request_id=known)
    assert client.submit({}, sources=given, request_id=known) == name
    with pytest.raises(http.SlipwayError, match="EXPORT_EXISTS"):
        client.submit({"formats": {"gguf": {"enabled": True}}}, sources=given, request_id=known)
    client.cancel(name)
    wait_for(lambda: client.get(name)["state"] == "EXPORT_STATE_CANCELLED")
    with pytest.raises(
        http.SlipwayError, match="CANCELLED: the export was cancelled; slipway retry projects/red/exports/"
    ):
        client.wait(name)
    client.cancel(name)  # it has ended already
    assert client.submit({}, sources=given, request_id=known, continues=False) == name
    assert client.get(name)["state"] == "EXPORT_STATE_CANCELLED"
    assert client.submit({}, sources=given, request_id=known) == name
    assert client.get(name)["state"] in {"EXPORT_STATE_QUEUED", "EXPORT_STATE_RUNNING"}
    client.cancel(name)


@pytest.mark.parametrize(
    ("configuration", "reason", "said", "remedy"),
    [
        ({"formats": {"gguf": {"quantization": {"levels": ["q4_k_n"]}}}}, "CONFIGURATION_INVALID", "q4_k_n", "q4_k_m"),
        ({"validation": {"efort": "quick"}}, "REQUEST_INVALID", "validation.efort", "leave it out"),
    ],
)
def test_what_a_coordinator_refuses_is_said_with_its_remedy(
    place: HttpPlace, configuration: dict[str, Any], reason: str, said: str, remedy: str
) -> None:
    with pytest.raises(http.SlipwayError, match=said) as caught:
        submitter(place).submit(configuration, sources=sources(place), request_id="refused")
    assert caught.value.reason == reason
    assert remedy in str(caught.value)


def test_a_wrong_token_is_refused_at_once(place: HttpPlace, tmp_path: Path) -> None:
    with pytest.raises(http.SlipwayError) as caught:
        client_of(place, token="wrong", patience_seconds=60).get("projects/red/exports/x")
    assert caught.value.reason == "UNAUTHENTICATED"
    (tmp_path / "token").write_text(place.tokens["submitter"] + "\n")
    with pytest.raises(http.SlipwayError, match="EXPORT_NOT_FOUND"):
        client_of(place, token_file=str(tmp_path / "token")).get("projects/red/exports/x")


@pytest.mark.parametrize(
    "more", [{"token_file": "/nonexistent/token"}, {"url": "https://127.0.0.1:1", "ca_file": "/nonexistent/ca"}, {"url": "coordinator:7080"}]
)  # fmt: skip
def test_wrong_settings_are_said_without_a_call(more: dict[str, str]) -> None:
    client = http.Slipway(**{"url": "http://127.0.0.1:1", **more})
    with pytest.raises(http.SlipwayError, match=r"CONFIGURATION_INVALID: .*check url, token_file and ca_file"):
        client.get("projects/red/exports/x")


def test_a_coordinator_that_is_away_for_a_moment_is_waited_for(place: HttpPlace) -> None:
    there: list[tuple[str, int]] = []
    answers: list[str] = []
    with TcpProxy(lambda: there[0] if there else None) as proxy:
        client = http.Slipway(f"http://{proxy.address}", token=place.tokens["submitter"], patience_seconds=0)
        with pytest.raises(http.SlipwayError, match="COORDINATOR_UNAVAILABLE") as caught:
            client.get("projects/red/exports/x")
        assert caught.value.retryable
        client.patience_seconds = 30

        def ask() -> None:
            try:
                client.get("projects/red/exports/x")
            except http.SlipwayError as error:
                answers.append(error.reason)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)  # the first try has failed, or the second is the first: both are right
        there.append(("127.0.0.1", place.server.http_port))
        asking.join(60)
    assert answers == ["EXPORT_NOT_FOUND"]


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"[]", b"\xff"])
def test_a_server_of_another_kind_is_not_waited_for(body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = http.Slipway(f"http://127.0.0.1:{listener.getsockname()[1]}", patience_seconds=60)
        answering = threading.Thread(target=answer, args=(listener, body))
        answering.start()
        with pytest.raises(http.SlipwayError, match="does not answer as a coordinator does"):
            client.get("projects/red/exports/x")
        answering.join(30)


def answer(listener: socket.socket, body: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def documented() -> dict[str, Any]:
    """The configurations that the examples show, by their file."""
    page = (FILE.with_name("README.md")).read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (run,) = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "slipway.run"
    ]
    dag = (FILE.parent / "airflow" / "export_dag.py").read_text()
    nodes = list(ast.walk(ast.parse(dag)))
    (shown,) = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "configuration"]
    params = {
        str(ast.literal_eval(key)): ast.literal_eval(value.args[0])
        for node in nodes
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is not None and isinstance(value, ast.Call)
    }
    given = ast.literal_eval(shown)
    resource = yaml.safe_load((FILE.parent / "kopf" / "model-export.yaml").read_text())
    return {
        "README.md": ast.literal_eval(run.args[0]),
        "export_dag.py": {
            **given,
            "checkpoint": {"path": params["checkpoint"]},
            "baseModel": {"name": params["base_model"]},
            "formats": params["formats"],
        },
        "model-export.yaml": resource["spec"]["configuration"],
    }


@pytest.mark.parametrize("name", ["README.md", "export_dag.py", "model-export.yaml"])
def test_configurations_of_the_examples_are_planned(place: HttpPlace, name: str) -> None:
    body = {"configuration": documented()[name], "sources": sources(place), "validateOnly": True}
    planned = place.call("submitter", "POST", "/v1/projects/red/exports", body)
    assert planned.status == 200, planned.body
    assert "onnx-int8" in {task.get("format") for task in planned.json["tasks"]}


PROGRAM = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
import slipway_http
client = slipway_http.Slipway.from_environment()
print(client.run({}, request_id="interrupted", sources=json.loads(sys.argv[1])))
"""


def test_an_interrupt_cancels_the_export(place: HttpPlace) -> None:
    environment = {
        "SLIPWAY_URL": f"http://127.0.0.1:{place.server.http_port}",
        "SLIPWAY_PROJECT": "red",
        "SLIPWAY_TOKEN": place.tokens["submitter"],
        "PYTHONPATH": str(FILE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-P", "-S", "-u", "-c", PROGRAM, json.dumps(sources(place))]
    client, before = submitter(place), [each["name"] for each in exports(place)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            running.stdout.readline()  # it waits: a task was told
            (export,) = [each for each in exports(place) if each["name"] not in before]
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: client.get(export["name"])["state"] == "EXPORT_STATE_CANCELLED")


def exports(place: HttpPlace) -> list[dict[str, Any]]:
    return list(place.call("submitter", "GET", "/v1/projects/red/exports").json.get("exports", ()))
