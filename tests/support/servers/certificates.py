"""A certificate authority of a test, and files made with it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme

from slipway.settings.security import Security, TlsFiles


class Authority:
    """An authority, and a folder with the files it made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        replace(self.ca, self._authority.cert_pem.bytes())

    def files(self, name: str, *names: str, expires: dt.datetime | None = None) -> TlsFiles:
        """Issue a certificate and key for DNS names and addresses, in files called ``name``; replace earlier ones."""
        made = self._authority.issue_cert(*(names or (name,)), not_after=expires)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        replace(key, made.private_key_pem.bytes())
        replace(certificate, b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return TlsFiles(ca=self.ca, certificate=certificate, key=key)

    def client(self, name: str, *, expires: dt.datetime | None = None, **more: Path) -> Security:
        """Return the settings of a client with a certificate."""
        files = self.files(name, expires=expires)
        return Security(tls_ca_file=self.ca, tls_cert_file=files.certificate, tls_key_file=files.key, **more)


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, as programs that renew certificates do."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
