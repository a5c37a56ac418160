"""What the surroundings say: read once, at the edge, into one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from slipway.errors import ConfigurationError

LogLevel = Literal["debug", "info", "warning", "error"]
Tracing = Literal["", "otlp", "console"]


class Settings(BaseModel):
    """Settings of this machine and process, as opposed to those of one export.

    Attributes:
        home: Folder of the artifact store and of embedded exports' state (``SLIPWAY_HOME``).
        coordinator: ``HOST:PORT`` of a coordinator; empty runs exports inside the command (``SLIPWAY_COORDINATOR``).
        scratch: Folder of running stages; best on the file system of ``home``, where results are committed without a
            copy (``SLIPWAY_SCRATCH``).
        log_level: Level of Slipway's own log (``SLIPWAY_LOG_LEVEL``).
        tracing: ``otlp`` sends OpenTelemetry spans to ``OTEL_EXPORTER_OTLP_ENDPOINT`` (by default
            ``http://localhost:4317``), ``console`` writes them to standard error, empty is off (``SLIPWAY_TRACING``).
        otlp_endpoint: Collector that ``otlp`` sends to (``OTEL_EXPORTER_OTLP_ENDPOINT``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path
    coordinator: str = ""
    scratch: Path
    log_level: LogLevel = "info"
    tracing: Tracing = ""
    otlp_endpoint: str = "http://localhost:4317"

    @property
    def store_path(self) -> Path:
        """Folder of the local artifact store."""
        return self.home / "store"

    @property
    def exports_path(self) -> Path:
        """Folder with one folder of state per embedded export."""
        return self.home / "exports"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """The settings in ``SLIPWAY_*``; this is the one place that reads them.

        Raises:
            ConfigurationError: A variable has an impossible value.
        """
        home = Path(environment.get("SLIPWAY_HOME") or "~/.cache/slipway").expanduser().absolute()
        scratch = environment.get("SLIPWAY_SCRATCH")
        return cls(
            home=home,
            coordinator=environment.get("SLIPWAY_COORDINATOR", ""),
            scratch=Path(scratch).expanduser().absolute() if scratch else home / "scratch",
            log_level=_choice(environment, "SLIPWAY_LOG_LEVEL", "info", get_args(LogLevel)),
            tracing=_choice(environment, "SLIPWAY_TRACING", "", get_args(Tracing)),
            otlp_endpoint=environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4317",
        )


def _choice(environment: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> Any:
    value = environment.get(name, "").strip().lower() or default
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise ConfigurationError(f"{name} is {value!r}", remedy=f"use one of {known}, or unset it", about={"key": name})
    return value
