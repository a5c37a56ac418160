"""What the embedded mode needs to run an export's tasks on an engine: an address that nodes reach, tokens, and a store that they share.

The coordinator in the command listens on loopback unless the user names another address, and then only with TLS. A worker shows a token
that can do nothing but work; the command's own client shows another one. Owner, worker's token and port are kept in the export's folder,
which only the user can read: if the command is killed, its workers go on, and the next command finds them under the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from slipway.contracts.coordinator import EmbeddedEngine
from slipway.contracts.engine import EngineChoice, WorkerStart
from slipway.errors import ConfigurationError
from slipway.files.json_documents import read_object_or_empty
from slipway.security.access.held_tokens import HeldTokens
from slipway.security.access.principals import OWNER, Principal, Role, new_token
from slipway.security.server import ServerSecurity
from slipway.security.tls import is_private_address
from slipway.settings import Settings
from slipway.settings.s3 import SCHEME
from slipway.settings.security import Security
from slipway.texts import number_of, quoted

_STATE = "engine.json"
_WORKER = "engine"
"""Name of the workers' principal: the first part of their names."""
_EVERYWHERE = ("0.0.0.0", "[::]", "::", "")  # noqa: S104 - refused


@dataclass(frozen=True)
class EngineSide:
    """The engine of one embedded export.

    Attributes:
        address: ``HOST:PORT`` to listen on.
        engine: The engine, for the coordinator.
        client: Identity of the command's own client.
    """

    address: str
    engine: EmbeddedEngine
    client: Security

    def client_address(self, port: int) -> str:
        """Return the address of the coordinator that listens at a port."""
        return f"{self.address.rpartition(':')[0]}:{port}"


def check_engine(settings: Settings) -> EngineChoice | None:
    """Return the engine that the settings choose, checked before anything is started; None if tasks run in the command.

    Raises:
        ConfigurationError: ``ENGINE_UNKNOWN``, ``ACCESS_OPEN``, or ``CONFIGURATION_INVALID`` for an address to listen on.
        ModelExportError: The engine's libraries are not installed, or its address names no cluster.
    """
    choice = EngineChoice.parse(settings.engine)
    if choice is not None:
        _check_listen(settings)
        choice.service.check(choice.address)
    return choice


@contextlib.contextmanager
def engine_side(choice: EngineChoice, settings: Settings, folder: Path) -> Iterator[EngineSide]:
    """Yield the engine of the export whose state is in a folder; its lock is held."""
    stored = _load_state(folder)
    host, port = _check_listen(settings)
    address = f"{host}:{port or _port_again(host, stored)}"
    own = new_token()
    principals = {
        own: OWNER,
        str(stored["token"]): Principal(_WORKER, frozenset({Role.WORKER}), frozenset({"*"}), holds_store=True),
    }
    tls = settings.security.tls
    # Callers show tokens, so they need no certificates.
    security = ServerSecurity(tls=None if tls is None else replace(tls, ca=None), authenticator=HeldTokens(principals))
    client = settings.security.model_copy(update={"token": SecretStr(own), "token_file": None})
    with worker_start(settings, owner=str(stored["owner"]), token=str(stored["token"])) as start_at:

        def start(port: int) -> WorkerStart:
            _store_state(folder, {**stored, "port": port})
            return start_at(f"{host}:{port}")

        engine = EmbeddedEngine(
            name=choice.name,
            owner=str(stored["owner"]),
            open=lambda port: choice.service.open(choice.address, start(port)),
            security=security,
        )
        yield EngineSide(address, engine, client)


def _check_listen(settings: Settings) -> tuple[str, int]:
    """Return host and port to listen on; the port is 0 for a free one.

    Raises:
        ConfigurationError: ``ACCESS_OPEN``, or ``CONFIGURATION_INVALID``.
    """
    text = settings.engine_listen
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, "0"
    about = {"key": "SLIPWAY_ENGINE_LISTEN"}
    if host in _EVERYWHERE or (port != "0" and not number_of(port, most=65535)):
        raise ConfigurationError(
            f"SLIPWAY_ENGINE_LISTEN is {quoted(text)}",
            remedy="write HOST:PORT with the address of this machine that the nodes reach; port 0 is a free one",
            about=about,
        )
    if settings.security.tls_cert_file is None and not is_private_address(f"{host}:{port}"):
        raise ConfigurationError(
            f"nodes would send the token of their workers to {host} without encryption",
            reason="ACCESS_OPEN",
            remedy="give a certificate with SLIPWAY_TLS_CERT_FILE, SLIPWAY_TLS_KEY_FILE and SLIPWAY_TLS_CA_FILE, or listen on 127.0.0.1 "
            "if all nodes are on this machine",
            about=about,
        )
    return host, int(port)


def _load_state(folder: Path) -> dict[str, object]:
    """Return owner, token and port of an earlier command, or new ones."""
    stored = read_object_or_empty(folder / _STATE)
    if all(isinstance(stored.get(name), str) and stored[name] for name in ("owner", "token")):
        return stored
    return {"owner": f"{folder.name[:40]}-{secrets.token_hex(8)}", "token": new_token(), "port": 0}


def _store_state(folder: Path, state: dict[str, object]) -> None:
    path = folder / f".{_STATE}"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(state, file)
    path.replace(folder / _STATE)


def _port_again(host: str, stored: dict[str, object]) -> int:
    """Return the port of an earlier command, whose workers may still call it, if it is free; else 0."""
    port = stored.get("port")
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), port))
        return port
    return 0


@contextlib.contextmanager
def worker_start(settings: Settings, *, owner: str, token: str) -> Iterator[Callable[[str], WorkerStart]]:
    """Yield a function that returns how an engine starts workers, given the address at which they reach the coordinator.

    Args:
        settings: Settings of the coordinator's process, whose store they use.
        owner: Name of the coordinator at the engine.
        token: What they show to the coordinator; empty for nothing.
    """
    with _marked_store(settings) as (store, mark):
        environment, files = _environment(settings, store, token=token), _files(settings)
        yield lambda address: WorkerStart(owner, address, store, environment, files, mark)


@contextlib.contextmanager
def _marked_store(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the store, and the name of a file in its folder by which nodes show that they see the same folder."""
    if settings.store.startswith(SCHEME):
        yield settings.store, ""
        return
    store = Path(settings.store) if settings.store else settings.store_path
    store.mkdir(parents=True, exist_ok=True)
    mark = store / f".engine-{secrets.token_hex(16)}"
    mark.touch()
    try:
        yield str(store), mark.name
    finally:
        mark.unlink(missing_ok=True)


def _environment(settings: Settings, store: str, *, token: str) -> dict[str, SecretStr]:
    """Return the variables of workers: what this command knows, and nothing of where a node has its own folders."""
    values = {
        "SLIPWAY_STORE": store,
        "SLIPWAY_TOKEN": token,
        "SLIPWAY_LOG_LEVEL": settings.log_level,
        "SLIPWAY_TRACING": "otlp" if settings.tracing == "otlp" else "",
        "SLIPWAY_TLS_SERVER_NAME": settings.security.tls_server_name,
        "SLIPWAY_IMPORT_FROM": settings.import_from,
        "HF_ENDPOINT": settings.hub_endpoint,
    }
    if settings.tracing == "otlp":
        values |= {
            "OTEL_EXPORTER_OTLP_PROTOCOL": settings.otlp_protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": settings.otlp_endpoint,
        }
    if store.startswith(SCHEME):
        s3 = settings.s3
        values |= {
            "AWS_ENDPOINT_URL_S3": s3.endpoint,
            "AWS_REGION": s3.region,
            # Without keys of its own, the command has others than the nodes: they use theirs.
            "AWS_ACCESS_KEY_ID": s3.access_key.get_secret_value(),
            "AWS_SECRET_ACCESS_KEY": s3.secret_key.get_secret_value(),
            "AWS_SESSION_TOKEN": s3.session_token.get_secret_value(),
        }
    return {name: SecretStr(value) for name, value in values.items() if value}


def _files(settings: Settings) -> dict[str, str]:
    """Return the authorities by which workers check this command's certificate."""
    authorities = settings.security.tls_ca_file
    if settings.security.tls_cert_file is None or authorities is None:
        return {}
    return {"SLIPWAY_TLS_CA_FILE": authorities.read_text(encoding="utf-8")}
