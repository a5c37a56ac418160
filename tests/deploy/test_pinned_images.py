"""Digests of other people's images, from a registry here that speaks as Docker Hub does."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from support.servers.local_http import local_http

SCRIPT = Path(__file__).parents[2] / "deploy" / "pin_images.py"
FIRST, SECOND = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


class Registry(BaseHTTPRequestHandler):
    """Knows one image, and asks for a token."""

    digest: ClassVar[str] = FIRST

    def do_HEAD(self) -> None:
        host = self.headers["Host"]
        if self.headers.get("Authorization") != "Bearer of-a-reader":
            self.send_response(401)
            self.send_header(
                "WWW-Authenticate", f'Bearer realm="http://{host}/token",service="here",scope="repository:a/b:pull"'
            )
        elif self.path == "/v2/a/b/manifests/1.2" and "image.index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", self.digest)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        body = (
            json.dumps({"token": "of-a-reader"}).encode() if "scope=repository%3Aa%2Fb%3Apull" in self.path else b"{}"
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", SCRIPT, *map(str, words)], capture_output=True, text=True)


def test_images_are_pinned_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_http(Registry, waits=True) as address:
        image = f"{address.removeprefix('http://')}/a/b:1.2"
        compose, docker = tmp_path / "compose.yaml", tmp_path / "Dockerfile.cpu"
        compose.write_text(f"services:\n  ours:\n    image: slipway-merge:0.1.0\n  theirs:\n    image: {image}\n")
        docker.write_text(f"ARG BASE={image}\nFROM ${{BASE}}\n")
        assert run("--check", compose, docker).returncode == 1
        assert "sha256" not in compose.read_text()
        done = run(compose, docker)
        assert (done.returncode, done.stdout.count("not pinned")) == (0, 2)
        assert f"    image: {image}@{FIRST}\n" in compose.read_text()
        assert "image: slipway-merge:0.1.0\n" in compose.read_text()
        assert docker.read_text() == f"ARG BASE={image}@{FIRST}\nFROM ${{BASE}}\n"
        assert run("--check", compose, docker).returncode == 0
        monkeypatch.setattr(Registry, "digest", SECOND)
        moved = run("--check", compose)
        assert (moved.returncode, f"is {SECOND}, pinned to {FIRST}" in moved.stdout) == (1, True)
        assert run(compose).returncode == 0
        assert f"{image}@{SECOND}\n" in compose.read_text()


def test_a_digest_that_nobody_says_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_http(Registry, waits=True) as address:
        text = f"ARG BASE={address.removeprefix('http://')}/a/b:9.9\n"
        (tmp_path / "Dockerfile.cpu").write_text(text)
        unknown = run(tmp_path / "Dockerfile.cpu")
        assert (unknown.returncode, "does not say the digest" in unknown.stderr) == (1, True)
        monkeypatch.setattr(Registry, "digest", "sha256:short")
        (tmp_path / "Dockerfile.cpu").write_text(text.replace("9.9", "1.2"))
        assert run(tmp_path / "Dockerfile.cpu").returncode == 1
    assert "sha256" not in (tmp_path / "Dockerfile.cpu").read_text()
