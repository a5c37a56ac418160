"""The connection to an OpenTelemetry collector, read from OpenTelemetry's own variables and checked once, before anything is sent.

The exporters of OpenTelemetry read these variables, too, but take much of what they cannot use: with a file of authorities that does
not exist they trust those of the system, and an address that is none is found out at the first request.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn
from urllib.parse import urlsplit

from slipway.errors import ConfigurationError
from slipway.texts import hidden_character, number_of, quoted, redact_address

if TYPE_CHECKING:
    from slipway.settings import Settings
    from slipway.settings.machine import OtlpProtocol

Signal = Literal["traces", "logs"]

_PREFIX = "OTEL_EXPORTER_OTLP_"
_COMPRESSIONS: Mapping[OtlpProtocol, tuple[str, ...]] = {
    "grpc": ("none", "gzip"),
    "http/protobuf": ("none", "gzip", "deflate"),
}
_TARGET = re.compile(r"(?:[^\s:/\[\]@]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]+)|unix:[^\s]+")
"""Address of a collector that is reached by gRPC, without a scheme."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*=[ \t]*[ !#-+\--:<-\[\]-~]*")


@dataclass(frozen=True, slots=True)
class Connection:
    """How telemetry of one kind reaches its collector.

    Attributes:
        protocol: How it is sent.
        endpoint: Address of the collector; over HTTP with the path.
        headers: Names and values of headers.
        compression: ``none``, ``gzip`` or ``deflate``.
        tls: Checks the collector's certificate, and shows ours; None without TLS.
        authorities: File of the authorities of its certificate; None for those of the system.
        certificate: File of our certificate, if it asks for one.
        key: File of its key.
    """

    protocol: OtlpProtocol
    endpoint: str
    headers: tuple[tuple[str, str], ...]
    compression: str
    tls: ssl.SSLContext | None
    authorities: Path | None
    certificate: Path | None
    key: Path | None


def read_connection(settings: Settings, signal: Signal, environment: Mapping[str, str]) -> Connection:
    """Return the connection for one kind of telemetry. Its own variables come before those of all kinds.

    Args:
        settings: The address of the collector, and how it is reached, unless variables of this kind say otherwise.
        signal: The kind, as in ``OTEL_EXPORTER_OTLP_LOGS_ENDPOINT``.
        environment: Variables.

    Raises:
        ConfigurationError: A variable cannot be used, or a file that it names.
    """
    variables = _Variables(environment, signal)
    protocol, endpoint = _read_place(settings, signal, variables)
    name, compression = variables.find("COMPRESSION")
    compression = compression.lower() or "none"
    if compression not in _COMPRESSIONS[protocol]:
        _refuse(name, quoted(compression), f"use one of {', '.join(_COMPRESSIONS[protocol])}")
    is_secure = endpoint.lower().startswith("https://")
    files = {kind: variables.find(kind) for kind in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")}
    authorities, certificate, key = (Path(path) if path and is_secure else None for _, path in files.values())
    return Connection(
        protocol=protocol,
        endpoint=endpoint,
        headers=_read_headers(*variables.find("HEADERS")),
        compression=compression,
        tls=_read_tls(files) if is_secure else None,
        authorities=authorities,
        certificate=certificate,
        key=key,
    )


@dataclass(frozen=True, slots=True)
class _Variables:
    environment: Mapping[str, str]
    signal: Signal

    def own(self, kind: str) -> tuple[str, str]:
        """Return name and value of a variable of this kind of telemetry alone."""
        name = f"{_PREFIX}{self.signal.upper()}_{kind}"
        return name, self.environment.get(name, "").strip()

    def find(self, kind: str) -> tuple[str, str]:
        """Return name and value of the variable that counts; an empty value if there is none."""
        name, value = self.own(kind)
        return (name, value) if value else (_PREFIX + kind, self.environment.get(_PREFIX + kind, "").strip())


def _read_place(settings: Settings, signal: Signal, variables: _Variables) -> tuple[OtlpProtocol, str]:
    """Return protocol and address.

    Raises:
        ConfigurationError: One of them cannot be used.
    """
    name, text = variables.own("PROTOCOL")
    protocols: dict[str, OtlpProtocol] = {each: each for each in _COMPRESSIONS}
    if text and text.lower() not in protocols:
        _refuse(name, quoted(text), f"use one of {', '.join(protocols)}")
    protocol = protocols[text.lower()] if text else settings.otlp_protocol
    own_name, own = variables.own("ENDPOINT")
    if protocol != settings.otlp_protocol and not own:
        _refuse(name, f"{quoted(text)} without {own_name}", f"set {own_name}: each protocol has a port of its own")
    endpoint, named_by = own or settings.otlp_endpoint, own_name if own else f"{_PREFIX}ENDPOINT"
    _check_endpoint(named_by, endpoint, protocol)
    if protocol == "http/protobuf" and not own:
        endpoint = f"{endpoint.rstrip('/')}/v1/{signal}"
    return protocol, endpoint


def _check_endpoint(name: str, endpoint: str, protocol: OtlpProtocol) -> None:
    """Refuse an address that nothing can be sent to.

    Raises:
        ConfigurationError: It is one.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_user = parts.username is not None
    except ValueError:  # brackets, or a port that is none
        is_url = is_user = False
    if is_url and is_user:
        _refuse(name, f"{redact_address(endpoint)}, with a user", f"give credentials in {_PREFIX}HEADERS")
    target = _TARGET.fullmatch(endpoint) if protocol == "grpc" else None
    is_target = target is not None and (target["port"] is None or bool(number_of(target["port"], most=65535)))
    if not (is_url or is_target) or " " in endpoint or hidden_character(endpoint):
        forms = "http://HOST:PORT or https://HOST:PORT" + (", or HOST:PORT" if protocol == "grpc" else "")
        _refuse(name, quoted(redact_address(endpoint)), f"use {forms}")


def _read_headers(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """Return headers as OpenTelemetry's exporters read them, which leave out what they cannot read.

    Raises:
        ConfigurationError: One cannot be sent; the message quotes no value, as it may be secret.
    """
    from opentelemetry.util.re import parse_env_headers

    parts = [part.strip() for part in text.split(",") if part.strip()]
    headers = parse_env_headers(text, liberal=True) if all(map(_HEADER.fullmatch, parts)) else {}
    if (parts and not headers) or not all(value.isascii() and value.isprintable() for value in headers.values()):
        _refuse(name, "not a list of headers", "write name=value,name=value, with values in URL encoding")
    return tuple(headers.items())


def _read_tls(files: Mapping[str, tuple[str, str]]) -> ssl.SSLContext:
    """Return what checks the collector's certificate, made from the named files.

    Raises:
        ConfigurationError: A file cannot be used.
    """
    (authorities_name, authorities), (certificate_name, certificate), (key_name, key) = files.values()
    if key and not certificate:
        _refuse(key_name, f"{quoted(key)} without a certificate", f"set {_PREFIX}CLIENT_CERTIFICATE")
    name, path = authorities_name, authorities
    try:
        context = ssl.create_default_context(cafile=authorities or None)
        if certificate:
            name, path = certificate_name, certificate
            context.load_cert_chain(certificate, key or None, password=lambda: b"")
    except OSError as error:  # ssl.SSLError is one, too
        _refuse(
            name, f"{quoted(path)}: {error.strerror or error}", "name a readable file in PEM; a key without passphrase"
        )
    return context


def _refuse(name: str, problem: str, remedy: str) -> NoReturn:
    raise ConfigurationError(f"{name} is {problem}", remedy=remedy, about={"key": name})
