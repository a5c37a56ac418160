"""Settings of this machine and process, read from the environment once, at the edge, into one frozen value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from slipway.errors import ConfigurationError
from slipway.files.paths import check_local, has_unknown_home, user_path
from slipway.settings.s3 import SCHEME, S3Options
from slipway.settings.security import Security
from slipway.settings.stage_environment import added_names
from slipway.sizes import parse_size
from slipway.texts import MalformedText, number_of, quoted, redact_address

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.-]+(?::\d{1,5})?/?|https?://\[[0-9A-Fa-f:]+\](?::\d{1,5})?/?")
_MOST = 1_000_000

LogLevel = Literal["debug", "info", "warning", "error"]
Tracing = Literal["", "otlp", "console"]
Audit = Literal["", "otlp"]
OtlpProtocol = Literal["grpc", "http/protobuf"]


class Settings(BaseModel):
    """Settings of this machine and process, as opposed to those of one export.

    Attributes:
        home: Folder of the artifact store and of embedded exports' state (``SLIPWAY_HOME``).
        store: The artifact store: ``s3://bucket/prefix`` or a folder. If empty, it is a folder in ``home``; clients of a
            coordinator then use the coordinator's store through it (``SLIPWAY_STORE``).
        s3: The S3 service and its credentials, from the variables of AWS's and MinIO's own tools.
        cache_bytes: Largest size of this machine's cache of an S3 store, by default ``50GB``; less if a task needs the space
            (``SLIPWAY_CACHE_SIZE``).
        upload_bytes: Largest file that a coordinator accepts from a client, by default ``128GiB``; a file over 80 GiB needs more
            of the coordinator's memory on the way to an S3 store (``SLIPWAY_UPLOAD_SIZE``).
        open_uploads: Number of files that the clients of one project may send to a coordinator at a time, by default 64; further
            uploads wait (``SLIPWAY_OPEN_UPLOADS``).
        import_from: Addresses from which clients may let workers import, separated by spaces or commas: ``s3://bucket/prefix``,
            ``hf://owner``, ``hf://owner/name``, each with everything below it; ``{project}`` stands for the export's project. Empty
            allows none. Coordinator and workers need the same value (``SLIPWAY_IMPORT_FROM``).
        import_bytes: Largest size of one import, by default ``2TB`` (``SLIPWAY_IMPORT_SIZE``).
        hub_endpoint: Address of the Hugging Face hub; empty uses the public one (``HF_ENDPOINT``).
        transfer_rate: Lowest average of bytes per second, over a minute, at which a client must send to a coordinator or read from
            it; by default ``16KiB`` (``SLIPWAY_TRANSFER_RATE``).
        download_endpoint: ``http(s)://host[:port]`` at which clients reach the S3 service of a coordinator's store: they then fetch large
            files from it, by addresses that are valid for some minutes. Empty lets all content pass through the coordinator
            (``SLIPWAY_DOWNLOAD_ENDPOINT``).
        coordinator: ``HOST:PORT`` of a coordinator; empty runs exports inside the command (``SLIPWAY_COORDINATOR``).
        engine: What runs the tasks of an export without a coordinator: ``NAME`` or ``NAME:ADDRESS``, such as ``ray``; empty, or ``pull``,
            runs them in the command (``SLIPWAY_ENGINE``).
        engine_listen: ``HOST:PORT`` at which the nodes of that engine reach the command, by default ``127.0.0.1:0``: a free port, for nodes
            on this machine. Any other host needs TLS (``SLIPWAY_ENGINE_LISTEN``).
        scratch: Folder of running stages; best on the file system of ``home``, where results are committed without a
            copy (``SLIPWAY_SCRATCH``).
        stage_environment: Names of environment variables, separated by commas, that stages get in addition to
            [those they need](../../docs/security.md#secrets), even if they look secret (``SLIPWAY_STAGE_ENVIRONMENT``).
        log_level: Level of Slipway's own log (``SLIPWAY_LOG_LEVEL``).
        tracing: ``otlp`` sends OpenTelemetry spans to ``OTEL_EXPORTER_OTLP_ENDPOINT`` (by default
            ``http://localhost:4317``), ``console`` writes them to standard error, empty is off (``SLIPWAY_TRACING``).
        audit: ``otlp`` sends the [audit log](../../docs/security.md#the-audit-log) of a coordinator or worker to the same collector, as
            log records, besides standard error; empty is off (``SLIPWAY_AUDIT``).
        project: Project of exports at a coordinator (``SLIPWAY_PROJECT``).
        security: Certificates and tokens; see :class:`~slipway.settings.security.Security`.
        signing_key: Private key in PEM that signs what is published, unless another is named (``SLIPWAY_SIGNING_KEY``); its passphrase
            comes from ``SLIPWAY_SIGNING_PASSPHRASE``.
        signing_certificate: Certificate of that key in PEM, which goes into signatures (``SLIPWAY_SIGNING_CERTIFICATE``).
        signing_certificate_chain: Certificates in PEM that lead from it to a root (``SLIPWAY_SIGNING_CERTIFICATE_CHAIN``).
        otlp_protocol: How ``otlp`` sends (``OTEL_EXPORTER_OTLP_PROTOCOL``): ``grpc`` or ``http/protobuf``.
        otlp_endpoint: Collector that ``otlp`` sends to (``OTEL_EXPORTER_OTLP_ENDPOINT``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path
    store: str = ""
    s3: S3Options = S3Options()
    cache_bytes: int | None = 50_000_000_000
    upload_bytes: int = 128 << 30
    open_uploads: int = 64
    import_from: str = ""
    import_bytes: int = 2_000_000_000_000
    hub_endpoint: str = ""
    transfer_rate: int = 16 << 10
    download_endpoint: str = ""
    coordinator: str = ""
    engine: str = ""
    engine_listen: str = "127.0.0.1:0"
    scratch: Path
    stage_environment: tuple[str, ...] = ()
    log_level: LogLevel = "info"
    tracing: Tracing = ""
    audit: Audit = ""
    project: str = "default"
    security: Security = Security()
    signing_key: Path | None = None
    signing_certificate: Path | None = None
    signing_certificate_chain: Path | None = None
    otlp_protocol: OtlpProtocol = "grpc"
    otlp_endpoint: str = "http://localhost:4317"

    @property
    def store_path(self) -> Path:
        """Return the folder of the local artifact store."""
        return self.home / "store"

    @property
    def cache_path(self) -> Path:
        """Return the folder of this machine's cache of an S3 store."""
        return self.home / "cache"

    @property
    def exports_path(self) -> Path:
        """Return the folder with one folder of state per embedded export."""
        return self.home / "exports"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the settings in ``SLIPWAY_*``; no other place reads them.

        Raises:
            ConfigurationError: A variable has an impossible value.
        """
        for name in ("SLIPWAY_HOME", "SLIPWAY_SCRATCH"):
            check_local(environment.get(name, ""), named_by=name)
        home = _read_folder("SLIPWAY_HOME", environment.get("SLIPWAY_HOME") or "~/.cache/slipway")
        scratch = environment.get("SLIPWAY_SCRATCH")
        given: dict[str, Any] = {
            "store": _read_store(environment.get("SLIPWAY_STORE", "")),
            "cache_bytes": _read_size(environment, "SLIPWAY_CACHE_SIZE"),
            "upload_bytes": _read_size(environment, "SLIPWAY_UPLOAD_SIZE"),
            "open_uploads": _read_count(environment, "SLIPWAY_OPEN_UPLOADS"),
            "import_from": environment.get("SLIPWAY_IMPORT_FROM"),
            "import_bytes": _read_size(environment, "SLIPWAY_IMPORT_SIZE"),
            "hub_endpoint": environment.get("HF_ENDPOINT", "").rstrip("/"),
            "transfer_rate": _read_size(environment, "SLIPWAY_TRANSFER_RATE", least=1),
            "download_endpoint": _read_endpoint(environment, "SLIPWAY_DOWNLOAD_ENDPOINT"),
            "coordinator": environment.get("SLIPWAY_COORDINATOR"),
            "engine": environment.get("SLIPWAY_ENGINE"),
            "engine_listen": environment.get("SLIPWAY_ENGINE_LISTEN"),
            "stage_environment": added_names(environment),
            "log_level": _read_choice(environment, "SLIPWAY_LOG_LEVEL", get_args(LogLevel)),
            "tracing": _read_choice(environment, "SLIPWAY_TRACING", get_args(Tracing)),
            "audit": _read_choice(environment, "SLIPWAY_AUDIT", get_args(Audit)),
            "signing_key": _read_file(environment, "SLIPWAY_SIGNING_KEY"),
            "signing_certificate": _read_file(environment, "SLIPWAY_SIGNING_CERTIFICATE"),
            "signing_certificate_chain": _read_file(environment, "SLIPWAY_SIGNING_CERTIFICATE_CHAIN"),
            "project": environment.get("SLIPWAY_PROJECT"),
            "otlp_protocol": _read_choice(environment, "OTEL_EXPORTER_OTLP_PROTOCOL", get_args(OtlpProtocol)),
            "otlp_endpoint": environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _usual_collector(environment),
        }
        return cls(
            home=home,
            scratch=_read_folder("SLIPWAY_SCRATCH", scratch) if scratch else home / "scratch",
            s3=S3Options.from_environment(environment),
            security=Security.from_environment(environment),
            **{name: value for name, value in given.items() if value not in (None, "")},  # otherwise the default
        )


def _usual_collector(environment: Mapping[str, str]) -> str:
    """Return the usual address of a collector on this machine, whose port depends on the protocol."""
    return (
        "http://localhost:4318"
        if environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip().lower() == "http/protobuf"
        else ""
    )


def _read_store(text: str) -> str:
    text = text.strip()
    if not text or text.startswith(SCHEME):
        return text
    if _URL.match(text):  # taken as a path, it would silently be a local folder
        raise ConfigurationError(
            f"SLIPWAY_STORE is {text!r}", remedy="use s3://bucket/prefix or a folder", about={"key": "SLIPWAY_STORE"}
        )
    return str(_read_folder("SLIPWAY_STORE", text))


def _read_folder(name: str, text: str) -> Path:
    if has_unknown_home(text):
        raise ConfigurationError(
            f"{name} is {quoted(text)}, the home of an account that does not exist here",
            remedy="write out the path",
            about={"key": name},
        )
    return user_path(text).absolute()


def _read_file(environment: Mapping[str, str], name: str) -> Path | None:
    text = environment.get(name, "")
    check_local(text, named_by=name)
    return _read_folder(name, text) if text else None


def _read_endpoint(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name, "").strip()
    if text and not _ENDPOINT.fullmatch(text):
        raise _value_error(name, redact_address(text), "give http(s)://host[:port]")
    return text.rstrip("/")


def _read_size(environment: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    text = environment.get(name, "").strip()
    try:
        given = parse_size(text) if text else None
    except MalformedText as error:
        raise ConfigurationError(f"{name}: {error.message}", remedy=error.remedy, about={"key": name}) from error
    if given is not None and given < least:
        raise _value_error(name, text, f"give {least} or more")
    return given


def _read_count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if text and not number_of(text, most=_MOST):
        raise _value_error(name, text, "give a number from 1")
    return number_of(text, most=_MOST)


def _read_choice(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environment.get(name, "").strip().lower()
    if value and value not in choices:
        raise _value_error(name, value, f"use one of {', '.join(filter(None, choices))}")
    return value


def _value_error(name: str, value: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{name} is {quoted(value)}", remedy=f"{remedy}, or unset it", about={"key": name})
