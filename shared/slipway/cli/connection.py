"""Options of all commands that can talk to a coordinator."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from slipway.client import Client
    from slipway.settings import Settings

_PANEL = "Connection"
_META = "slipway.connection"


@dataclass(frozen=True, slots=True)
class Connection:
    """The values of a command's connection options.

    Attributes:
        coordinator: ``HOST:PORT``; empty for none.
        project: Project; empty for the default.
        files: Given files with the token and certificates.
    """

    coordinator: str = ""
    project: str = ""
    files: dict[str, Path | None] = field(default_factory=dict)

    def settings(self) -> Settings:
        """Return the settings from the environment, overridden by the options."""
        from slipway.settings import Settings

        settings = Settings.from_environment(os.environ)
        changes = {
            "coordinator": self.coordinator,
            "project": self.project or settings.project,
            "security": settings.security.with_files(**self.files),
        }
        return settings.model_copy(update=changes)

    def options(self) -> list[str]:
        """Return the words of a command line for the same connection."""
        words = ["--coordinator", self.coordinator] if self.coordinator else []
        words += ["--project", self.project] if self.project else []
        files = {name: path for name, path in self.files.items() if path is not None}
        return [*words, *(word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", str(path)))]

    def client(self) -> Client:
        """Return a client of the coordinator.

        Raises:
            BadParameter: No coordinator is named.
            ConfigurationError: A file cannot be used.
        """
        if not self.coordinator:
            raise typer.BadParameter("give --coordinator HOST:PORT or set SLIPWAY_COORDINATOR")
        from slipway.client import Client

        settings = self.settings()
        return Client(self.coordinator, security=settings.security, project=settings.project)


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
    token_file: Annotated[Path | None, _file("token-file", "File with the token that identifies you.")] = None,
    tls_ca_file: Annotated[
        Path | None,
        _file("tls-ca-file", "Authorities that the coordinator's certificate must come from; turns TLS on."),
    ] = None,
    tls_cert_file: Annotated[Path | None, _file("tls-cert-file", "Certificate that identifies you.")] = None,
    tls_key_file: Annotated[Path | None, _file("tls-key-file", "Key of that certificate.")] = None,
) -> Connection:
    """Hold the options of a connection; this is not a command."""
    files = {
        "token_file": token_file,
        "tls_ca_file": tls_ca_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
    }
    return Connection(coordinator or "", project or "", files)


@functools.cache  # all commands share it: making it takes a millisecond or two
def _connection_command() -> Any:
    return typer.main.get_command(_options)


class ConnectedCommand(TyperCommand):
    """A command with connection options after its own; :func:`connection_of` returns their values."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._connection = _connection_command()
        self.params += self._connection.params

    def invoke(self, ctx: Any) -> Any:
        """Run the command without the connection's options, which go into a :class:`Connection`."""
        values = {option.name: ctx.params.pop(option.name) for option in self._connection.params}
        ctx.meta[_META] = ctx.invoke(self._connection.callback, **values)
        return super().invoke(ctx)


def connection_of(ctx: typer.Context) -> Connection:
    """Return the connection options of a :class:`ConnectedCommand`."""
    connection: Connection = ctx.meta[_META]
    return connection
