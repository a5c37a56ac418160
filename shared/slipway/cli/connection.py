"""Options of every command that can talk to a coordinator, added in one place."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slipway.artifacts import Artifacts
    from slipway.client import Client
    from slipway.settings import Settings

_PANEL = "Connection"


def _file(name: str, meaning: str) -> Any:
    option = typer.Option(
        f"--{name}", metavar="FILE", help=meaning, envvar=f"SLIPWAY_{_variable(name)}", rich_help_panel=_PANEL
    )
    return Annotated[Path | None, option]


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


_OPTIONS: dict[str, Any] = {
    "coordinator": Annotated[
        str | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Coordinator to use.",
            envvar="SLIPWAY_COORDINATOR",
            rich_help_panel=_PANEL,
        ),
    ],
    "project": Annotated[
        str | None,
        typer.Option(
            "--project", help="Project of exports and artifacts.", envvar="SLIPWAY_PROJECT", rich_help_panel=_PANEL
        ),
    ],
    "token_file": _file("token-file", "File with the token to show."),
    "tls_ca_file": _file("tls-ca-file", "Authorities of the coordinator's certificate; turns TLS on."),
    "tls_cert_file": _file("tls-cert-file", "Certificate to show."),
    "tls_key_file": _file("tls-key-file", "Key of that certificate."),
}


@dataclass(frozen=True, slots=True)
class Connection:
    """What the options of a command said.

    Attributes:
        coordinator: ``HOST:PORT``, empty for none.
        project: Empty for the default.
        files: Files of token and certificates that were named.
    """

    coordinator: str = ""
    project: str = ""
    files: dict[str, Path | None] = field(default_factory=dict)

    def settings(self) -> Settings:
        """Settings from the environment, with the options in their place."""
        from slipway.settings import Settings

        found = Settings.from_environment(os.environ)
        changes = {
            "coordinator": self.coordinator,
            "project": self.project or found.project,
            "security": found.security.replacing(**self.files),
        }
        return found.model_copy(update=changes)

    def options(self) -> list[str]:
        """The words of a command line that lead to the same coordinator."""
        words = ["--coordinator", self.coordinator] if self.coordinator else []
        words += ["--project", self.project] if self.project else []
        files = {name: path for name, path in self.files.items() if path is not None}
        return [*words, *(word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", str(path)))]

    def client(self) -> Client:
        """A client of the coordinator.

        Raises:
            BadParameter: None is named.
            ConfigurationError: A file cannot be used.
        """
        if not self.coordinator:
            raise typer.BadParameter("give --coordinator HOST:PORT or set SLIPWAY_COORDINATOR")
        from slipway.client import Client

        settings = self.settings()
        return Client(self.coordinator, security=settings.security, project=settings.project)


@contextlib.contextmanager
def artifacts_at(coordinator: str, settings: Settings) -> Iterator[Artifacts]:
    """Artifacts through a coordinator, which needs no store; those of the store for who names one, or no coordinator.

    What is stored or fetched is not collected before the context ends.
    """
    if coordinator and not settings.store:
        from slipway.client.artifacts import ProjectArtifacts
        from slipway.client.calls import BlockingCalls

        with BlockingCalls(coordinator, security=settings.security) as calls:
            yield ProjectArtifacts(calls, settings.project)
    else:
        from slipway.artifacts.opening import open_store

        store = open_store(settings)
        with store.using():
            yield store


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of a connection in place of its parameter ``connection``."""

    @functools.wraps(command)
    def call(**given: Any) -> None:
        said = {name: given.pop(name) for name in _OPTIONS}
        coordinator, project = said.pop("coordinator") or "", said.pop("project") or ""
        command(connection=Connection(coordinator, project, said), **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "connection"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    merged = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *added]
    call.__signature__ = signature.replace(parameters=merged)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in merged} | {"return": None}
    return call
