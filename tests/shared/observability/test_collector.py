"""OpenTelemetry's variables for the connection to a collector: what they mean, and that bad ones are refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.observability.audit_records import sending_audit
from slipway.observability.collector import Connection, Signal, read_connection
from slipway.observability.telemetry import tracing
from slipway.settings import Settings
from support.servers.certificates import Authority

PREFIX = "OTEL_EXPORTER_OTLP_"
PROTOCOLS = ("grpc", "http/protobuf")


def read(signal: Signal = "logs", **variables: str) -> Connection:
    environment = {"SLIPWAY_HOME": "/nowhere", **{PREFIX + name: value for name, value in variables.items()}}
    return read_connection(Settings.from_environment(environment), signal, environment)


def refusal(**variables: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        read(**variables)
    assert caught.value.remedy
    return caught.value


def test_the_variables_of_one_kind_come_before_those_of_all() -> None:
    common = {"ENDPOINT": "http://all:4317", "HEADERS": "token=of-all", "COMPRESSION": "gzip"}
    own = {
        "LOGS_ENDPOINT": "http://logs:80/in",
        "LOGS_PROTOCOL": "http/protobuf",
        "LOGS_HEADERS": "token=of%20logs,a=b",
    }
    logs, traces = read("logs", **common, **own), read("traces", **common, **own)
    assert (logs.protocol, logs.endpoint) == ("http/protobuf", "http://logs:80/in"), "whole, with its path"
    assert logs.headers == (("token", "of logs"), ("a", "b"))
    assert (traces.protocol, traces.endpoint, traces.headers) == ("grpc", "http://all:4317", (("token", "of-all"),))
    assert {logs.compression, traces.compression} == {"gzip"}


def test_without_variables_it_is_the_usual_collector() -> None:
    assert read().endpoint == "http://localhost:4317"
    over_http = read(PROTOCOL="http/protobuf")
    assert (over_http.endpoint, over_http.headers, over_http.compression) == (
        "http://localhost:4318/v1/logs",
        (),
        "none",
    )


@pytest.mark.parametrize("endpoint", ["collector:4317", "[::1]:4317", "unix:/run/collector.sock", "http://collector"])
def test_grpc_takes_targets_too(endpoint: str) -> None:
    assert read(ENDPOINT=endpoint).endpoint == endpoint


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "http://[::1",
        "https://",
        "http://a b:1",
        "http://a:99999",
        "http://a:0",
        "ftp://a:1",
        "http://a\u202e:1",
        "\ud800:1",
        "a@b:1",
        "a:99999",
        "a:0",
        "unix:",
    ],
)
def test_an_impossible_address_is_refused(endpoint: str, protocol: str) -> None:
    error = refusal(ENDPOINT=endpoint, PROTOCOL=protocol)
    assert error.about == {"key": "OTEL_EXPORTER_OTLP_ENDPOINT"}
    assert error.message.isprintable()


@pytest.mark.parametrize("endpoint", ["http://me:hidden@a:1", "https://me@a:1"])
def test_an_address_with_a_user_is_refused_without_showing_it(endpoint: str) -> None:
    error = refusal(LOGS_ENDPOINT=endpoint)
    assert error.about == {"key": "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"}
    assert "//…@a:1" in error.message
    assert "HEADERS" in error.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMPRESSION", "zip"),
        ("LOGS_COMPRESSION", "deflate"),  # gRPC has none
        ("LOGS_PROTOCOL", "http/json"),
        ("LOGS_PROTOCOL", "http/protobuf"),  # at the other protocol's port
        ("HEADERS", "authorization"),
        ("HEADERS", "a b=c"),
        ("LOGS_HEADERS", "a=hidden%0Ab"),
        ("LOGS_HEADERS", "a=hidden%E2%80%AE"),
    ],
)
def test_values_that_cannot_be_used_are_refused(name: str, value: str) -> None:
    error = refusal(**{name: value})
    assert error.about == {"key": PREFIX + name}
    assert "hidden" not in error.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_files_are_read_at_the_start(protocol: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("worker", "127.0.0.1")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no certificate")
    secure = {"ENDPOINT": "https://127.0.0.1:1", "PROTOCOL": protocol}
    good = {
        "CERTIFICATE": str(authority.ca),
        "CLIENT_CERTIFICATE": str(files.certificate),
        "CLIENT_KEY": str(files.key),
    }
    connection = read(**secure, **good)
    assert (connection.authorities, connection.certificate, connection.key) == (
        authority.ca,
        files.certificate,
        files.key,
    )
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE"):
        for path in (tmp_path / "none", nonsense, tmp_path):
            error = refusal(**secure, **{**good, name: str(path)})
            assert error.about == {"key": PREFIX + name}
            assert path.name in error.message
    assert refusal(**secure, CLIENT_KEY=str(files.key)).about == {"key": f"{PREFIX}CLIENT_KEY"}
    assert read(ENDPOINT="http://a:1", CERTIFICATE=str(tmp_path / "none")).tls is None, "not needed there"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{PREFIX}HEADERS", "nonsense"),
        ("OTEL_PYTHON_EXPORTER_OTLP_{}_CREDENTIAL_PROVIDER", "nonsense"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES", "NOPE"),
    ],
)
def test_services_do_not_start_with_what_an_exporter_cannot_use(
    name: str, value: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name.format(protocol.partition("/")[0].upper()), value)
    given = Settings.from_environment(
        {
            "SLIPWAY_HOME": "/nowhere",
            "SLIPWAY_TRACING": "otlp",
            "SLIPWAY_AUDIT": "otlp",
            f"{PREFIX}ENDPOINT": "https://127.0.0.1:9",
            f"{PREFIX}PROTOCOL": protocol,
        }
    )
    if not (protocol == "http/protobuf" and "GRPC" in name):
        with pytest.raises(ConfigurationError) as caught, tracing(given):
            pass
        assert "OTEL_" in caught.value.remedy or "name=value" in caught.value.remedy
    if name.startswith(PREFIX):
        with pytest.raises(ConfigurationError), sending_audit(given, service="slipway-worker"):
            pass
