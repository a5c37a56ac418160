"""Hubs and buckets that answer what they should not: each answer has a reason, and nothing leaves the import's folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ModelExportError
from slipway.sources import hub_origin
from slipway.sources.hub_origin import HubOrigin
from slipway.sources.mirror import Mirror
from support.servers import hub_server
from support.servers.hub_server import HubServer

COMMIT = "0" * 40


class LyingHub(HubServer):
    """A hub whose answer about a repository is whatever a test wants."""

    answer: bytes = b""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingHub]:
    from huggingface_hub import constants

    def info(handler: Any, _name: str, _revision: str) -> None:
        handler.send(200, handler.hub.answer, {"Content-Type": "application/json"})

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read from the environment at import
    monkeypatch.setattr(hub_server._Handler, "info", info)  # the one part of the real server that lies
    with LyingHub() as running:
        yield running


def told(*siblings: Any, **changes: Any) -> bytes:
    document = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": list(siblings), **changes}
    return json.dumps(document).encode()


def file(name: Any = "config.json", size: Any = 2, **more: Any) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": "a" * 40, **more}


def large(size: Any, sha: Any) -> dict[str, Any]:
    return file("model.safetensors", lfs={"sha256": sha, "size": size, "pointerSize": 1})


NOT_UNDERSTOOD = {
    "negative": told(file(size=-5)),
    "2^63": told(file(size=2**63)),
    "2^80": told(file(size=2**80)),
    "float": told(file(size=1e300)),
    "text": told(file(size="many")),
    "name-null": told({"rfilename": None}),
    "siblings-text": told(siblings="x"),
    "sibling-number": told(7),
    "lfs-size": told(large(-1, "a" * 64)),
    "lfs-path": told(large(3000, "../../x")),
    "lfs-list": told(large(3000, ["a"])),
    "list": b"[]",
    "cut": b"{",
    "empty": b"",
    "deep": b"[" * 100_000,
    "digits": b'{"sha":' + b"9" * 10_000 + b"}",
    "page": b"<html>sign in</html>",
    "no-id": b"{}",
    "date": told(createdAt="9999-99-99"),
}


@pytest.mark.parametrize("answer", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_an_answer_that_no_hub_gives_is_worth_another_try(hub: LyingHub, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises(ModelExportError) as caught:
        HubOrigin("hf://org/tiny", endpoint=hub.endpoint)
    failure = caught.value.failure()
    assert (failure.reason, failure.retryable) == ("STORE_UNAVAILABLE", True)
    assert "cannot be understood" in failure.message


@pytest.mark.parametrize(
    "names",
    [
        ["../../x.json"],
        ["/etc/x.json"],
        ["a\0b.json"],
        ["\ud800.json"],
        ["x" * 300 + ".json"],
        ["/".join(["d"] * 3000) + "/x.json"],
        ["config.json", "config.json/x.json"],
        ["a/b.json", "a/b.json/c/d.json"],
    ],
    ids=["up", "absolute", "nul", "surrogate", "long", "deep", "file-and-folder", "deeper"],
)
def test_names_that_are_no_files_are_refused_before_anything_is_written(
    hub: LyingHub, tmp_path: Path, names: list[str]
) -> None:
    hub.answer = told(*map(file, names))
    make: Callable[[], Any] = lambda: Mirror(HubOrigin("hf://org/tiny", endpoint=hub.endpoint), tmp_path / "in")  # noqa: E731
    with pytest.raises(ModelExportError) as caught:
        make()
    assert caught.value.reason == "ARTIFACT_INVALID"
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("content", [b"x" * 10, b""], ids=["ten-bytes", "nothing"])
def test_a_hub_that_sends_a_few_bytes_at_a_time_is_given_up(
    hub: LyingHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    def little(handler: Any, _name: str, _commit: str, _path: str, span: str) -> None:
        handler.send(206 if span else 200, content)

    monkeypatch.setattr(hub_server._Handler, "content", little)  # as above
    monkeypatch.setattr(hub_origin, "_FIRST_PAUSE", 0.01)
    hub.answer = told(file("model.safetensors", 10_000_000))
    origin = HubOrigin("hf://org/tiny", endpoint=hub.endpoint)
    with pytest.raises(ModelExportError) as caught, ThreadPoolExecutor(1) as pool:
        origin.download(origin.listing(most=10)[0], tmp_path / "x", pool=pool, on_bytes=lambda _: None)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert len(hub.seen) < 20


def test_a_hub_that_drips_is_given_up(hub: LyingHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def drip(handler: Any, _name: str, _commit: str, _path: str, span: str) -> None:
        handler.send_response(206 if span else 200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                handler.wfile.write(b"x")
                time.sleep(0.05)
        handler.close_connection = True

    monkeypatch.setattr(hub_server._Handler, "content", drip)  # as above
    monkeypatch.setattr(hub_origin, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(hub_origin, "_TIMEOUT_SECONDS", 0.2)
    hub.answer = told(file("model.safetensors", 10_000_000))
    origin, began = HubOrigin("hf://org/tiny", endpoint=hub.endpoint), time.monotonic()
    with pytest.raises(ModelExportError, match="more slowly") as caught, ThreadPoolExecutor(1) as pool:
        origin.download(origin.listing(most=10)[0], tmp_path / "x", pool=pool, on_bytes=lambda _: None)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert time.monotonic() - began < 10
