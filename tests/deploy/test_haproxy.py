"""HAProxy of the compose file, the program itself: it takes its configuration, and leads gRPC and the console to the active coordinator."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway_coordinator.server import migrate
from slipway_coordinator.storage.database_access import state_at
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.coordinators.http_places import Answer, call
from support.servers.free_ports import free_ports
from support.servers.postgres_server import postgres_server

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
HOSTS = {"coordinator-a": "127.0.0.2", "coordinator-b": "127.0.0.3"}

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


def check(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["haproxy", "-c", "-f", str(file)], capture_output=True, text=True)


def test_haproxy_itself_takes_its_configuration(tmp_path: Path) -> None:
    done = check(CONFIGURATION)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "haproxy.cfg"
    broken.write_text(CONFIGURATION.read_text().replace("default_backend http", "default_backend https"))
    assert check(broken).returncode != 0


class Compose:
    """The coordinators of the compose file behind HAProxy, each at an address of loopback, with ports that are free here.

    Args:
        folder: For logs and stores.
        place: The database.
        stack: Ends the processes.
    """

    def __init__(self, folder: Path, place: str, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._environment = {"SLIPWAY_STATE": place, "SLIPWAY_HOME": str(folder / "home")}
        names = ("7070", "7080", "9464")
        self._ports = dict(zip(names, map(str, free_ports(3)), strict=True))
        self._front = dict(zip(names[:2], map(str, free_ports(2)), strict=True))
        self.grpc, self.http = (f"localhost:{self._front[name]}" for name in names[:2])

    def coordinator(self, name: str) -> subprocess.Popen[bytes]:
        """Start a coordinator with the words of its service."""
        program, *words = SERVICES[name]["command"]
        assert program == "slipway"
        moved = [
            re.sub(r"=0\.0\.0\.0:(\d+)$", lambda each: f"={HOSTS[name]}:{self._ports[each[1]]}", word) for word in words
        ]
        assert sum(HOSTS[name] in word for word in moved) == 3
        return self._stack.enter_context(process([SLIPWAY, *moved], self._folder / f"{name}.log", **self._environment))

    def proxy(self) -> None:
        """Start HAProxy with the hosts and ports of its configuration moved."""
        text = CONFIGURATION.read_text()
        for port, here in self._front.items():
            assert f"127.0.0.1:{port}:{port}" in SERVICES["coordinator"]["ports"]
            text = text.replace(f"bind :{port}", f"bind 127.0.0.1:{here}")
        for port, here in self._ports.items():
            text = re.sub(rf"(coordinator-[ab]:|check port ){port}\b", rf"\g<1>{here}", text)
        for host, address in HOSTS.items():
            text = text.replace(host, address)
        file = self._folder / "haproxy.cfg"
        file.write_text(text)
        self._stack.enter_context(process(["haproxy", "-f", str(file)], self._folder / "haproxy.log"))

    def get(self, path: str, *, host: str = "localhost") -> Answer | None:
        """Make a request of the published port; None if the connection ends without a response."""
        with contextlib.suppress(OSError):
            return call(self.http, "GET", path, host=host)
        return None

    def serves(self) -> bool:
        """Return whether the published port leads to a coordinator that takes calls."""
        found = self.get("/healthz")
        return found is not None and found.status == 200

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    with postgres_server() as server, ExitStack() as stack:
        place = server.create(f"s{time.monotonic_ns()}")
        migrate(state_at(place))
        yield Compose(tmp_path, place, stack)


@pytest.mark.slow
def test_both_published_ports_lead_to_the_coordinator_that_is_active(compose: Compose) -> None:
    compose.proxy()
    first = compose.coordinator("coordinator-a")
    wait_for(lambda: compose.serves() or first.poll() is not None, seconds=120)
    assert first.poll() is None, compose.said("coordinator-a")
    compose.coordinator("coordinator-b")
    wait_for(lambda: "standing by" in compose.said("coordinator-b"), seconds=120)
    page = compose.get("/ui/")
    assert page is not None
    assert page.status == 200, page.body
    assert b"<title>" in page.body
    with Client(compose.grpc) as client:
        assert list(client.list_exports()) == []
    # Nobody shows who they are here, so a page that gives its own name this address is refused.
    for host, status in (("coordinator:7080", 200), ("evil.example:7080", 403)):
        answer = compose.get("/v1/projects/default/exports", host=host)
        assert answer is not None
        assert answer.status == status, host
    first.kill()
    first.wait()
    wait_for(lambda: '"active"' in compose.said("coordinator-b"))
    wait_for(compose.serves)
    with Client(compose.grpc) as client:
        wait_for(lambda: exports(client) == [])


def exports(client: Client) -> list[str] | None:
    """Return the names of exports, or None while no coordinator answers."""
    try:
        return [one.name for one in client.list_exports()]
    except ModelExportError:
        return None
