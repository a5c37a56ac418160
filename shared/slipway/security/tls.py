"""Certificates, keys and authorities from files, and addresses that need none, because they stay on this machine."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.errors import ConfigurationError
from slipway.security.reloading import describe_path
from slipway.settings.security import TlsFiles

if TYPE_CHECKING:
    import grpc

_LOOPBACK = ("127.", "[::1]", "localhost:")


@dataclass(frozen=True, slots=True)
class Material:
    """Content of :class:`TlsFiles`, checked."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


def load(files: TlsFiles) -> Material:
    """Read and check the files.

    Raises:
        ConfigurationError: reason ``TLS_INVALID``, naming the file.
    """
    if (files.certificate is None) != (files.key is None):
        raise _invalid_error("a certificate and its key belong together, but only one is named")
    content = [None if path is None else _read(path, kind) for kind, path in files.by_setting().items()]
    if files.ca is not None:
        try:
            ssl.create_default_context(cafile=str(files.ca))
        except ssl.SSLError as error:
            raise _invalid_error(f"{files.ca} has no certificate authority ({error.reason})", files.ca) from error
        except OSError as error:  # replaced since it was read
            raise _invalid_error(f"{files.ca}: {error.strerror}", files.ca) from error
    if files.certificate is not None and files.key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                files.certificate,
                files.key,
                password=lambda: b"",  # otherwise an encrypted key prompts on the terminal
            )
        except ssl.SSLError as error:
            raise _invalid_error(
                f"{files.certificate}: certificate and key do not belong together ({error.reason})", files.certificate
            ) from error
        except OSError as error:
            raise _invalid_error(f"{files.certificate}: {error.strerror}", files.certificate) from error
    return Material(*content)


def server_credentials(material: Material) -> grpc.ServerCredentials:
    """Return credentials of a server; with an authority, clients must have a certificate from it.

    Raises:
        ConfigurationError: reason ``TLS_INVALID``.
    """
    import grpc

    if material.certificate is None or material.key is None:
        raise _invalid_error("a server needs a certificate and a key")
    return grpc.ssl_server_credentials(
        [(material.key, material.certificate)],
        root_certificates=material.ca,
        require_client_auth=material.ca is not None,
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server that takes clients with and without a certificate; one that is shown must be of the authority.

    Raises:
        ConfigurationError: reason ``TLS_INVALID``.
    """
    load(files)
    if files.certificate is None or files.key is None:
        raise _invalid_error("a server needs a certificate and a key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
        if files.ca is not None:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_OPTIONAL
    except (ssl.SSLError, OSError) as error:  # replaced since they were checked
        raise _invalid_error(f"{files.certificate}: {error.strerror or error}", files.certificate) from error
    return context


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return credentials of a client."""
    import grpc

    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        name = describe_path(path, setting)
        raise _invalid_error(f"{name}: {error.strerror or 'it cannot be read'}", name) from None


def _invalid_error(what: str, path: Path | str = "") -> ConfigurationError:
    return ConfigurationError(
        what,
        reason="TLS_INVALID",
        remedy="name PEM files with --tls-cert-file, --tls-key-file and --tls-ca-file",
        about={"file": str(path)} if path else None,
    )


def is_private_address(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return address.startswith(("unix:", *_LOOPBACK))
