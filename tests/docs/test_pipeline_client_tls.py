"""The client of the examples of pipelines checks the coordinator's certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.security.server import ServerSecurity
from slipway.settings.security import TlsFiles
from support.commands.pipeline_client import load_client
from support.coordinators.harness import Harness
from support.servers.certificates import Authority

http = load_client()


def test_a_certificate_is_checked(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "tls"), Authority(tmp_path / "other")
    files = authority.files("server", "localhost")
    tls = TlsFiles(certificate=files.certificate, key=files.key)
    (tmp_path / "home").mkdir()
    security = ServerSecurity(tls=tls, http_address="127.0.0.1:0")
    with Harness(tmp_path / "home", with_worker=False, security=security) as harness:
        url = f"https://localhost:{harness.server.http_port}"
        with pytest.raises(http.SlipwayError, match="EXPORT_NOT_FOUND"):
            http.Slipway(url, ca_file=str(authority.ca), patience_seconds=0).get("projects/default/exports/x")
        with pytest.raises(http.SlipwayError, match="CERTIFICATE_VERIFY_FAILED"):
            http.Slipway(url, ca_file=str(other.ca), patience_seconds=60).get("projects/default/exports/x")
