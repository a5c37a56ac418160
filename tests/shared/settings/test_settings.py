"""Settings of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.settings import Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = Settings.from_environment({})
    assert settings.home == Path("/home/somebody/.cache/slipway")
    assert settings.scratch == settings.home / "scratch"
    assert settings.store_path == settings.home / "store"
    assert (settings.coordinator, settings.tracing, settings.log_level) == ("", "", "info")


def test_variables() -> None:
    settings = Settings.from_environment(
        {
            "SLIPWAY_HOME": "/srv/slipway",
            "SLIPWAY_SCRATCH": "/fast",
            "SLIPWAY_COORDINATOR": "host:7070",
            "SLIPWAY_TRACING": "OTLP",
            "SLIPWAY_AUDIT": " otlp",
            "SLIPWAY_UPLOAD_SIZE": "8GiB",
            "SLIPWAY_OPEN_UPLOADS": "5",
            "SLIPWAY_TRANSFER_RATE": "1MiB",
            "SLIPWAY_LOG_LEVEL": "debug",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        }
    )
    assert (settings.home, settings.scratch) == (Path("/srv/slipway"), Path("/fast"))
    assert (settings.coordinator, settings.tracing, settings.log_level) == ("host:7070", "otlp", "debug")
    assert (settings.audit, settings.otlp_endpoint) == ("otlp", "http://collector:4317")
    assert (settings.upload_bytes, settings.open_uploads, settings.transfer_rate) == (8 << 30, 5, 1 << 20)


def test_an_impossible_value_names_the_variable() -> None:
    for name, value in (
        ("SLIPWAY_OPEN_UPLOADS", "0"),
        ("SLIPWAY_OPEN_UPLOADS", "many"),
        ("SLIPWAY_UPLOAD_SIZE", "big"),
        ("SLIPWAY_TRANSFER_RATE", "0"),
    ):
        with pytest.raises(ConfigurationError, match=f"{name}.*'{value}'"):
            Settings.from_environment({name: value})
    with pytest.raises(ConfigurationError, match=r"SLIPWAY_TRACING.*'jaeger'.*otlp, console"):
        Settings.from_environment({"SLIPWAY_TRACING": "jaeger"})
    with pytest.raises(ConfigurationError, match=r"SLIPWAY_AUDIT.*'console'.*use one of otlp"):
        Settings.from_environment({"SLIPWAY_AUDIT": "console"})
    for text in ("gs://bucket", "s3:/bucket/prefix", "s3:bucket"):
        with pytest.raises(ConfigurationError, match=rf"SLIPWAY_STORE.*'{text}'.*s3://bucket"):
            Settings.from_environment({"SLIPWAY_STORE": text})
