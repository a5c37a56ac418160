"""Where certificates, keys and tokens of this process lie: file names and, for one token, the environment itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of one end of a connection.

    Attributes:
        ca: Authorities that the other end's certificate has to come from.
        certificate: This end's certificate, with its chain; None for a client that only has a token.
        key: Key of the certificate.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def named(self) -> dict[str, Path | None]:
        """All three by the settings that name them."""
        return {"tls_ca_file": self.ca, "tls_cert_file": self.certificate, "tls_key_file": self.key}

    def paths(self) -> tuple[Path, ...]:
        """The files that are named."""
        return tuple(path for path in self.named().values() if path is not None)


class Security(BaseModel):
    """How this process proves who it is, and whom it believes.

    Attributes:
        tls_ca_file: Authorities of the other end's certificate; naming it turns TLS on (``SLIPWAY_TLS_CA_FILE``).
        tls_cert_file: This process's certificate (``SLIPWAY_TLS_CERT_FILE``).
        tls_key_file: Its key (``SLIPWAY_TLS_KEY_FILE``).
        tls_server_name: Name expected in the server's certificate when it is not the address's own
            (``SLIPWAY_TLS_SERVER_NAME``).
        token_file: File with the token of this client or worker, read again when it changes (``SLIPWAY_TOKEN_FILE``).
        token: The token itself, for where there are no files (``SLIPWAY_TOKEN``); the file wins.
        access_file: Whom a server lets in (``SLIPWAY_ACCESS_FILE``).
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
        """What ``SLIPWAY_TLS_*``, ``SLIPWAY_TOKEN*`` and ``SLIPWAY_ACCESS_FILE`` say."""
        values = {name: environment.get(f"SLIPWAY_{name.upper()}") for name in cls.model_fields}
        return cls.model_validate({name: value for name, value in values.items() if value})

    def replacing(self, **files: Path | None) -> Security:
        """These settings with the files that were given as flags."""
        return self.model_copy(update={name: path for name, path in files.items() if path is not None})

    @property
    def tls(self) -> TlsFiles | None:
        """Files of the connection; None when nothing turns TLS on."""
        if self.tls_ca_file is None and self.tls_cert_file is None and self.tls_key_file is None:
            return None
        return TlsFiles(ca=self.tls_ca_file, certificate=self.tls_cert_file, key=self.tls_key_file)
