"""Which engine runs an export, what is refused before anything starts, and the coordinator's address for its nodes."""

from __future__ import annotations

import json
import socket
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipway.configuration import ExportConfiguration
from slipway.contracts.engine import EngineChoice
from slipway.distribution import own_version
from slipway.embedded.coordinator import Embedded
from slipway.embedded.engine_side import check_engine
from slipway.engines.ray.options import load_stage_options
from slipway.engines.ray.service import SERVICE as RAY
from slipway.engines.ray.task_host import node_fault
from slipway.errors import ConfigurationError, ModelExportError
from slipway.rpc.values import failure_of_status
from slipway.settings import Settings
from slipway.settings.security import Security
from support import TINY_ENGINE
from support.commands.cli import run_here
from support.coordinators.harness import DIGEST, state


@pytest.fixture(autouse=True)
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine ``processes`` be found, here and in the workers that it starts."""
    monkeypatch.syspath_prepend(str(TINY_ENGINE))
    monkeypatch.setenv("SLIPWAY_TEST_STAGES", str(tmp_path))


def settings(home: Path, engine: str = "processes", **more: object) -> Settings:
    return Settings(home=home, scratch=home / "scratch", engine=engine, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "pull"])
def test_without_an_engine_tasks_run_in_the_command(tmp_path: Path, name: str) -> None:
    assert check_engine(settings(tmp_path, name)) is None


def test_an_engine_is_found_by_its_name_and_may_have_an_address(tmp_path: Path) -> None:
    choice = EngineChoice.parse("processes:host:6379")
    assert choice is not None
    assert (choice.name, choice.address) == ("processes", "host:6379")
    with pytest.raises(ConfigurationError, match=r"pull, .*processes") as caught:
        check_engine(settings(tmp_path, "mesos"))
    assert caught.value.reason == "ENGINE_UNKNOWN"


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("0.0.0.0:7070", "CONFIGURATION_INVALID"),
        ("[::]:7070", "CONFIGURATION_INVALID"),
        ("127.0.0.1:70700", "CONFIGURATION_INVALID"),
        ("10.0.0.5:0", "ACCESS_OPEN"),
        ("10.0.0.5", "ACCESS_OPEN"),
    ],
)
def test_an_address_for_nodes_that_would_not_be_safe_is_refused(tmp_path: Path, listen: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_engine(settings(tmp_path, engine_listen=listen))
    assert (caught.value.reason, caught.value.about["key"]) == (reason, "SLIPWAY_ENGINE_LISTEN")


def test_with_a_certificate_nodes_may_be_elsewhere(tmp_path: Path) -> None:
    security = Security(tls_cert_file=tmp_path / "c", tls_key_file=tmp_path / "k")
    assert check_engine(settings(tmp_path, engine_listen="10.0.0.5:7070", security=security)) is not None


def test_a_command_refuses_its_engine_before_it_looks_at_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    code = run_here("export", tmp_path / "run", "--base-model", tmp_path, "--engine", "processes:away")
    assert (code, "the cluster is away" in capfd.readouterr().err) == (7, True)
    assert not (tmp_path / "store").exists()
    code = run_here("export", tmp_path / "run", "--engine", "processes", "--coordinator", "127.0.0.1:1")
    assert (code, "excludes a coordinator" in capfd.readouterr().err) == (2, True)


def test_an_embedded_export_runs_on_an_engine(tmp_path: Path) -> None:
    folder = tmp_path / "exports" / "x"
    with Embedded(settings(tmp_path), "x") as embedded:
        kept = json.loads((folder / "engine.json").read_text())
        assert embedded.client.address == f"127.0.0.1:{kept['port']}"
        name = embedded.client.create_export(
            ExportConfiguration(), sources={"base": DIGEST, "adapter": DIGEST}, export_id="x"
        ).name
        export = list(embedded.client.watch_export(name))[-1].export
        (store,) = {path.parent for path in (tmp_path / "store").glob(".engine-*")}
        assert store == tmp_path / "store"
    assert state(export) == "failed"
    assert failure_of_status(export.error).reason == "ARTIFACT_NOT_FOUND"  # so a worker ran, and saw the store
    assert export.tasks[0].attempts[0].worker.startswith("engine/")
    assert not list((tmp_path / "store").glob(".engine-*"))
    assert stat.S_IMODE((folder / "engine.json").stat().st_mode) == 0o600
    with Embedded(settings(tmp_path), "x") as embedded:  # the same name, token and port: its workers find it again
        assert json.loads((folder / "engine.json").read_text()) == kept
        with pytest.raises(ModelExportError) as caught, _client(embedded.client.address, kept["token"]) as worker:
            worker.get_export(name)
        assert caught.value.reason == "PERMISSION_DENIED"
        with pytest.raises(ModelExportError) as caught, _client(embedded.client.address, "") as nobody:
            nobody.get_export(name)
        assert caught.value.reason == "UNAUTHENTICATED"


def _client(address: str, token: str) -> object:
    from slipway.client import Client

    return Client(address, security=Security(token=token))  # type: ignore[arg-type]


def test_a_node_says_why_it_cannot_run_workers(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        start = {
            "version": own_version(),
            "store": str(tmp_path),
            "mark": "mark",
            "coordinator": f"127.0.0.1:{server.getsockname()[1]}",
        }
        assert node_fault(start) == node_fault({**start, "mark": ""}) == ""
        assert "not the same folder" in node_fault({**start, "mark": "another"})
        assert "the coordinator 0.0.1" in node_fault({**start, "version": "0.0.1"})
    assert "SLIPWAY_ENGINE_LISTEN" in node_fault(start)


def test_ray_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ModelExportError) as caught:
        RAY.check("")
    if find_spec("ray") is None:
        assert (caught.value.reason, "slipway-ml[ray]" in caught.value.remedy) == ("UNSUPPORTED", True)
    else:
        assert (caught.value.reason, "RAY_ADDRESS" in caught.value.remedy) == ("ENGINE_UNAVAILABLE", True)


def test_options_of_stages_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "ray.yaml"
    path.write_text("default: {num_cpus: 4}\ngguf: {memory: 16GiB, resources: {disk: 1}}\n")
    options = load_stage_options({"SLIPWAY_RAY_OPTIONS": str(path)})
    assert options == {"default": {"num_cpus": 4.0}, "gguf": {"memory": 16 << 30, "resources": {"disk": 1.0}}}
    assert load_stage_options({}) == {}
    for text in ("gguf: {cpus: 4}", "gguf: {memory: much}", "[1]", "gguf: {num_cpus: -1}"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=path.name) as caught:
            load_stage_options({"SLIPWAY_RAY_OPTIONS": str(path)})
        assert caught.value.reason == "CONFIGURATION_INVALID"
