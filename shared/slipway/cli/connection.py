"""The options of every command that can talk to a coordinator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from slipway.artifacts import Artifacts
    from slipway.client import Client
    from slipway.settings import Settings

_PANEL = "Connection"
_META = "slipway.connection"


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


def _file(name: str, meaning: str) -> Any:
    variable = f"SLIPWAY_{name.upper().replace('-', '_')}"
    return typer.Option(f"--{name}", metavar="FILE", help=meaning, envvar=variable, rich_help_panel=_PANEL)


_options = typer.Typer(add_completion=False)


@_options.command()
def _connection(
    *,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Coordinator to use.", envvar="SLIPWAY_COORDINATOR", rich_help_panel=_PANEL
        ),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(help="Project of exports and artifacts.", envvar="SLIPWAY_PROJECT", rich_help_panel=_PANEL),
    ] = None,
    token_file: Annotated[Path | None, _file("token-file", "File with the token to show.")] = None,
    tls_ca_file: Annotated[
        Path | None, _file("tls-ca-file", "Authorities of the coordinator's certificate; turns TLS on.")
    ] = None,
    tls_cert_file: Annotated[Path | None, _file("tls-cert-file", "Certificate to show.")] = None,
    tls_key_file: Annotated[Path | None, _file("tls-key-file", "Key of that certificate.")] = None,
) -> Connection:
    """The options of a connection; no command of its own."""
    files = {
        "token_file": token_file,
        "tls_ca_file": tls_ca_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
    }
    return Connection(coordinator or "", project or "", files)


class ConnectedCommand(TyperCommand):
    """A command with the options of a connection below its own; :func:`connection_of` tells it what they said."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._connection = typer.main.get_command(_options)
        self.params += self._connection.params

    def invoke(self, ctx: Any) -> Any:
        """Take the connection's options out of the command's parameters, and run it."""
        said = {option.name: ctx.params.pop(option.name) for option in self._connection.params}
        ctx.meta[_META] = ctx.invoke(self._connection.callback, **said)
        return super().invoke(ctx)


def connection_of(ctx: typer.Context) -> Connection:
    """Return what the options of a :class:`ConnectedCommand` said."""
    found: Connection = ctx.meta[_META]
    return found
