"""Places of this process's certificates, keys and tokens: file names and, for one token, the environment itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate files of one end of a connection.

    Attributes:
        ca: Authorities that must have issued the other end's certificate.
        certificate: This end's certificate with its chain; None for a client that only has a token.
        key: Key of the certificate.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def by_setting(self) -> dict[str, Path | None]:
        """Return all three files by the names of their settings."""
        return {"tls_ca_file": self.ca, "tls_cert_file": self.certificate, "tls_key_file": self.key}

    def paths(self) -> tuple[Path, ...]:
        """Return the files that are set."""
        return tuple(path for path in self.by_setting().values() if path is not None)


class Security(BaseModel):
    """The identity of this process, and the peers it trusts.

    Attributes:
        tls_ca_file: Authorities of the other end's certificate; this setting turns TLS on (``SLIPWAY_TLS_CA_FILE``).
        tls_cert_file: This process's certificate (``SLIPWAY_TLS_CERT_FILE``).
        tls_key_file: Key of that certificate (``SLIPWAY_TLS_KEY_FILE``).
        tls_server_name: Expected name in the server's certificate if it differs from the address
            (``SLIPWAY_TLS_SERVER_NAME``).
        token_file: File with the token of this client or worker, read again when it changes (``SLIPWAY_TOKEN_FILE``).
        token: The token itself, if it is not in a file (``SLIPWAY_TOKEN``); the file wins.
        access_file: File that lists the callers a server accepts (``SLIPWAY_ACCESS_FILE``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_server_name: str = ""
    token_file: Path | None = None
    token: SecretStr = SecretStr("")
    access_file: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Security:
        """Read ``SLIPWAY_TLS_*``, ``SLIPWAY_TOKEN*`` and ``SLIPWAY_ACCESS_FILE``."""
        values = {name: environment.get(f"SLIPWAY_{name.upper()}") for name in cls.model_fields}
        return cls.model_validate({name: value for name, value in values.items() if value})

    def with_files(self, **files: Path | None) -> Security:
        """Return these settings with the files that were given as flags."""
        return self.model_copy(update={name: path for name, path in files.items() if path is not None})

    @property
    def tls(self) -> TlsFiles | None:
        """Return the files of the connection; None if no setting turns TLS on."""
        if self.tls_ca_file is None and self.tls_cert_file is None and self.tls_key_file is None:
            return None
        return TlsFiles(ca=self.tls_ca_file, certificate=self.tls_cert_file, key=self.tls_key_file)
