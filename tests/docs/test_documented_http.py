"""The calls over HTTP that docs/clients.md shows, by curl, one after the other against a server with TLS and tokens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.security.access.access_file import AccessFile
from slipway.security.access.principals import new_token, token_hash
from slipway.security.server import ServerSecurity
from slipway.settings.security import TlsFiles
from support.coordinators.harness import Harness
from support.servers.certificates import Authority

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
(PREPARATION,) = re.findall(r"^\$ (\(umask .*)$", PAGE, re.MULTILINE)
(ALIAS,) = re.findall(r"^\$ alias api='(.*)'$", PAGE, re.MULTILINE)
LINES = re.findall(r"^\$ api (.*)$", PAGE, re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Harness]:
    (tmp_path / "home").mkdir()
    token, access = new_token(), tmp_path / "access.yaml"
    access.write_text(
        f"principals: [{{name: ci, role: operator, projects: [research], token_sha256: {token_hash(token)}}}]"
    )
    (tmp_path / "ci.token").write_text(token)
    authority = Authority(tmp_path / "tls")
    files = authority.files("server", "localhost")
    tls = TlsFiles(certificate=files.certificate, key=files.key)
    security = ServerSecurity(tls=tls, authenticator=AccessFile(access), http_address="127.0.0.1:0")
    shutil.copy(authority.ca, tmp_path / "ca.pem")
    with Harness(tmp_path / "home", with_worker=False, security=security) as harness:
        yield harness


def test_every_documented_line_works_in_its_order(place: Harness, tmp_path: Path) -> None:
    def run(line: str) -> str:
        line = line.replace("coordinator:7080", f"localhost:{place.server.http_port}")
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
        return done.stdout

    run(PREPARATION)
    assert (tmp_path / "ci.header").stat().st_mode & 0o077 == 0
    answers = {line.rpartition("/")[2] + line.split("http")[0]: run(f"{ALIAS} {line}") for line in LINES}
    assert len(LINES) == 19
    (digest,) = json.loads(answers["artifacts"])["digests"]
    assert f"artifacts/{digest}" in PAGE
    assert "hello" in answers.values()  # the content itself
    events = [line[6:] for line in answers["y:watch--no-buffer "].splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["export"]["state"] == "EXPORT_STATE_CANCELLED"
    assert json.loads(answers["y:retry--request POST "])["state"] == "EXPORT_STATE_QUEUED"
    assert json.loads(answers["y--request DELETE "]) == {}
    assert json.loads(answers[f"{digest}--request DELETE "]) == {}
    assert json.loads(answers["formats"])["formats"][0]["name"] == "pytorch"
    assert json.loads(answers["workers"]) == {}, "none has joined"
    assert [each["name"] for each in json.loads(answers["projects"])["projects"]] == ["projects/research"]
    assert json.loads(answers["healthz"]) == {"status": "SERVING"}
