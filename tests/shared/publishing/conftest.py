"""A registry, keys, a delivered folder, and the publishing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipway.publishing.destination import Access
from slipway.publishing.publisher import Publishing, publish
from slipway.settings import Settings
from support.commands.delivered_folders import make_delivered, make_keys
from support.commands.signing_certificates import Publishers
from support.servers.registry_server import RegistryServer, registry_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_delivered(tmp_path / "run")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path)


@pytest.fixture
def publishers(tmp_path: Path) -> Publishers:
    return Publishers(tmp_path)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Every test takes a repository of its own."""
    with registry_server(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def access(tmp_path: Path) -> Access:
    environment = {"SLIPWAY_HOME": str(tmp_path / "home"), "DOCKER_CONFIG": str(tmp_path / "docker")}
    return Access(Settings.from_environment(environment), environment)


@pytest.fixture
def send(access: Access, keys: tuple[Path, Path]) -> Callable[..., Publishing]:
    """Publish a folder at an address, signed."""
    return lambda folder, url: publish(folder, [url], access=access, key=keys[0])
