"""The engine of a coordinator of its own process: ``slipway coordinator --engine NAME[:ADDRESS]``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

from slipway.contracts.engine import EngineChoice, WorkerStart
from slipway.embedded.engine_side import worker_start
from slipway.errors import ConfigurationError
from slipway.settings import Settings
from slipway.settings.security import Security
from slipway_coordinator.broker.submitter import EngineSetup
from slipway_coordinator.storage.database_access import State

_EVERYWHERE = ("0.0.0.0", "[::]", "")  # noqa: S104 - no node can call it


@contextlib.contextmanager
def engine_setup(
    text: str, settings: Settings, security: Security, state: State, *, listen: str, advertise: str
) -> Iterator[Callable[[int], EngineSetup] | None]:
    """Yield a function that returns the engine that a text chooses, given the port that the coordinator listens on; None for none.

    Args:
        text: ``NAME`` or ``NAME:ADDRESS``.
        settings: Settings of this process, whose store the nodes use.
        security: Its files and token: nodes show the token, and check the coordinator's certificate.
        state: The state, from which the coordinator's name at the engine is made.
        listen: Address that the coordinator listens on.
        advertise: Address at which others reach it, if it is another.

    Raises:
        ConfigurationError: ``ENGINE_UNKNOWN``, or ``CONFIGURATION_INVALID`` if nodes could not call the coordinator.
        ModelExportError: The engine's libraries are not installed, or its address names no cluster.
    """
    choice = EngineChoice.parse(text)
    if choice is None:
        yield None
        return
    named = "\n".join(filter(None, (str(state), choice.service.installation())))
    owner = f"coordinator-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
    if choice.service.has_templates:
        choice.service.check(choice.address)
        start = WorkerStart(owner, "", settings.store)
        yield lambda _: EngineSetup(choice.name, choice.service.open(choice.address, start), owner)
        return
    host = (advertise or listen).rpartition(":")[0]
    if listen.startswith("unix:") or host in _EVERYWHERE:
        raise ConfigurationError(
            f"nodes of the engine cannot call {advertise or listen}",
            remedy="give --advertise HOST:PORT, at which they reach this coordinator",
            about={"key": "--advertise"},
        )
    token = _token(security)
    if security.access_file is not None and not token:
        raise ConfigurationError(
            "workers that the engine starts have no token to show",
            reason="ACCESS_INVALID",
            remedy="set SLIPWAY_TOKEN_FILE to a file with the token of a principal whose role is worker",
            about={"key": "SLIPWAY_TOKEN_FILE"},
        )
    choice.service.check(choice.address)
    with worker_start(settings.model_copy(update={"security": security}), owner=owner, token=token) as start_at:

        def setup(port: int) -> EngineSetup:
            address = advertise or f"{host}:{port}"
            return EngineSetup(choice.name, choice.service.open(choice.address, start_at(address)), owner)

        yield setup


def _token(security: Security) -> str:
    if security.token_file is None:
        return security.token.get_secret_value().strip()
    try:
        return security.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{security.token_file} cannot be read: {error}",
            reason="ACCESS_INVALID",
            remedy="check SLIPWAY_TOKEN_FILE",
            about={"file": security.token_file},
        ) from error
