"""Publishing to a real registry: what it holds, what is sent again, and what a registry that lies is refused for."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.oci import registry as registry_module
from slipway.publishing.oci.reading import check_registry
from slipway.publishing.publication import BOM, SIGNATURE, STATEMENT
from slipway.publishing.publisher import Publishing, publish
from slipway.publishing.signatures.trust import TrustedKey
from support.commands.delivered_folders import files_below, make_delivered, make_keys
from support.servers.image_layouts import Layout
from support.servers.image_uploads import Uploader
from support.servers.registry_server import (
    PASSWORD,
    USER,
    RegistryServer,
    needs_registry,
    needs_skopeo,
    registry_proxy,
    skopeo,
)

pytest.importorskip("model_signing", reason="the extra publish is not installed")
pytestmark = needs_registry

Send = Callable[..., Publishing]


@needs_skopeo
def test_another_program_reads_what_was_published(
    registry: RegistryServer, folder: Path, send: Send, tmp_path: Path
) -> None:
    done = send(folder, f"oci://{registry.host}/models/run:v1").destinations[0]
    place = f"docker://{registry.host}/models/run"
    raw = skopeo("inspect", "--tls-verify=false", "--raw", f"{place}:v1")
    assert done.address == f"oci://{registry.host}/models/run@{digest_bytes(raw.encode())}"
    index = json.loads(raw)
    variants = {
        each["annotations"]["slipway.output"]: each
        for each in index["manifests"]
        if "slipway.output" in each["annotations"]
    }
    labels = variants["gguf-q4_k_m"]["annotations"]
    assert {"slipway.format": "gguf", "slipway.level": "q4_k_m", "slipway.kl": "0.004"}.items() <= labels.items()
    assert variants["gguf-q4_k_m"]["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    size = sum(path.stat().st_size for path in (folder / "gguf-q4_k_m").rglob("*") if path.is_file())
    assert labels["slipway.bytes"] == str(size)
    for name in variants:
        for source in (f"{place}:v1-{name}", f"{place}@{variants[name]['digest']}"):
            layout = Layout(source, tmp_path / name / str(source.count("@")))
            assert files_of(layout) == files_below(folder / name)


def files_of(layout: Layout) -> dict[str, bytes]:
    """The files of an artifact, as its manifest names them."""
    layers = layout.manifest["layers"]
    assert layout.config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in layers]}
    return {layer["annotations"]["org.cncf.model.filepath"]: layout.blob(layer["digest"]) for layer in layers}


def test_a_published_model_is_checked_by_its_manifests_alone(
    registry: RegistryServer, folder: Path, send: Send, access: Access, keys: tuple[Path, Path]
) -> None:
    send(folder, f"oci://{registry.host}/checked/run:v1")
    with registry_proxy(registry.host) as (host, seen):
        address, checked = check_registry(f"oci://{host}/checked/run:v1", access, trusted=TrustedKey(keys[1]))
        weights = hashlib.sha256((folder / "onnx-int4" / "model.onnx").read_bytes()).hexdigest()
        assert seen.count("HEAD", weights) == 1
        assert seen.count("GET", weights) == 0
    assert "@sha256:" in address
    assert (checked.verdict, checked.files) == ("passed", len(folder_checksums(folder)))
    assert checked.signed_by == hashlib.sha256(keys[1].read_bytes()).hexdigest()
    again, _ = check_registry(address.replace(host, registry.host), access, trusted=TrustedKey(keys[1]))
    assert again == address.replace(host, registry.host)


def folder_checksums(folder: Path) -> list[str]:
    return (folder / "MANIFEST.sha256").read_text().splitlines()


def test_only_what_is_new_is_sent_again(registry: RegistryServer, folder: Path, send: Send, tmp_path: Path) -> None:
    with registry_proxy(registry.host) as (host, seen):
        first = send(folder, f"oci://{host}/again/run:v1").destinations[0]
        assert first.sent_bytes > 6000
        # Tokenizers that outputs share are there once.
        assert first.sent_bytes < sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        seen.requests.clear()
        second = send(folder, f"oci://{host}/again/run:v1").destinations[0]
        assert (second.sent_bytes, second.address) == (0, first.address)
        assert seen.count("POST", "uploads") == 0
        other = make_delivered(tmp_path / "other", size=3100)
        third = send(other, f"oci://{host}/again/run:v2").destinations[0]
        assert third.sent_bytes > 6200
        assert third.kept_bytes > 0
        assert third.address != first.address


def test_an_upload_that_breaks_goes_on(
    registry: RegistryServer,
    tmp_path: Path,
    send: Send,
    access: Access,
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Chunks of the real size would take files of hundreds of megabytes.
    monkeypatch.setattr(registry_module, "CHUNK_BYTES", 100_000)
    folder = make_delivered(tmp_path / "large", size=450_000)
    with registry_proxy(registry.host, break_every=7) as (host, seen):
        send(folder, f"oci://{host}/broken/run:v1")
        assert seen.broken > 1
    check_registry(f"oci://{registry.host}/broken/run:v1", access, trusted=TrustedKey(keys[1]))
    weights = folder / "onnx-int4" / "model.onnx"
    assert registry.blob(digest_bytes(weights.read_bytes())).read_bytes() == weights.read_bytes()


def test_a_registry_that_still_stores_what_broke_is_waited_for(
    registry: RegistryServer, folder: Path, send: Send, access: Access
) -> None:
    since: list[float] = []

    def busy(method: str, path: str) -> Any:
        if method != "PATCH":
            return None
        since.append(time.monotonic())
        return (416, {}, b"") if since[-1] < since[0] + 1 else None

    with registry_proxy(registry.host, change=busy) as (host, _):
        send(folder, f"oci://{host}/busy/run:v1")
    assert check_registry(f"oci://{registry.host}/busy/run:v1", access)


def test_a_registry_that_never_takes_a_chunk_is_named(registry: RegistryServer, folder: Path, access: Access) -> None:
    def full(method: str, path: str) -> Any:
        return (416, {}, b"") if method == "PATCH" else None

    with registry_proxy(registry.host, change=full) as (host, seen), pytest.raises(ModelExportError) as caught:
        publish(folder, [f"oci://{host}/full/run"], access=replace(access, patience_seconds=0.5))
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert seen.count("PATCH", "/blobs/uploads/") >= 5


def test_memory_does_not_grow_with_the_files(registry: RegistryServer, tmp_path: Path, access: Access) -> None:
    folder = make_delivered(tmp_path / "large", size=48 << 20)
    tracemalloc.start()
    try:
        publish(folder, [f"oci://{registry.host}/memory/run:v1"], access=access)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_an_interruption_leaves_nothing_visible(registry: RegistryServer, folder: Path, send: Send) -> None:
    def refused(method: str, path: str) -> Any:
        return (403, {}, b"") if method == "PUT" and "/manifests/sha256" in path else None

    with registry_proxy(registry.host, change=refused) as (host, _):
        with pytest.raises(ModelExportError) as caught:
            send(folder, f"oci://{host}/interrupted/run:v1")
        assert caught.value.reason == "STORE_DENIED"
    tags = registry.folder / "data/docker/registry/v2/repositories/interrupted/run/_manifests/tags"
    assert not tags.exists()
    send(folder, f"oci://{registry.host}/interrupted/run:v1")
    assert {path.name for path in tags.iterdir()} >= {"v1", "v1-onnx-int4", "v1-gguf-q4_k_m"}


def test_a_registry_that_is_away_is_named(access: Access, folder: Path) -> None:
    with pytest.raises(ModelExportError) as caught:
        publish(folder, ["oci://127.0.0.1:1/away/run"], access=replace(access, patience_seconds=0.5))
    assert caught.value.reason == "STORE_UNAVAILABLE"


@pytest.mark.parametrize(
    "url",
    ["oci://", "oci://host", "oci://host/UPPER", "oci://host/a//b", "oci://host/a:b:c", "oci://user:secret@host/a", "oci://host/../a", "http://host/a", "registry/name", "oci://host/a?b=secret"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str, folder: Path, access: Access) -> None:
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [url], access=access)
    assert caught.value.reason == "DESTINATION_INVALID"
    assert "secret" not in str(caught.value)
    assert not (folder / STATEMENT).exists()


def put(registry: RegistryServer, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Change the index of a published model as somebody who may write to the registry can; return its new tag."""
    uploader = Uploader(registry, name)
    index = uploader.index("v1")
    change(index)
    uploader.manifest(index, "forged")
    return f"oci://{registry.host}/{name}:forged"


def test_an_index_that_was_changed_has_no_signature(
    registry: RegistryServer, folder: Path, send: Send, access: Access, keys: tuple[Path, Path]
) -> None:
    send(folder, f"oci://{registry.host}/forged/run:v1")

    def lose(index: dict[str, Any]) -> None:
        index["manifests"] = [
            each for each in index["manifests"] if each["annotations"].get("slipway.output") != "onnx-int4"
        ]

    def relabel(index: dict[str, Any]) -> None:
        index["annotations"]["slipway.verdict"] = "perfect"

    with pytest.raises(ModelExportError) as caught:
        check_registry(put(registry, "forged/run", lose), access, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    with pytest.raises(ModelExportError) as caught:
        check_registry(put(registry, "forged/run", relabel), access, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "SIGNATURE_MISSING"
    with pytest.raises(ModelExportError) as caught:
        check_registry(
            f"oci://{registry.host}/forged/run:v1", access, trusted=TrustedKey(make_keys(folder.parent, "other")[1])
        )
    assert caught.value.reason == "SIGNATURE_INVALID"
    with pytest.raises(ModelExportError) as caught:
        check_registry(f"oci://{registry.host}/forged/run:absent", access)
    assert caught.value.reason == "ARTIFACT_NOT_FOUND"
    with pytest.raises(ModelExportError) as caught:
        check_registry(f"oci://{registry.host}/forged/run:v1-onnx-int4", access)
    assert caught.value.reason in ("ARTIFACT_INVALID", "ARTIFACT_NOT_FOUND")


def test_blobs_that_were_lost_or_changed_are_found(
    registry: RegistryServer, folder: Path, send: Send, access: Access, keys: tuple[Path, Path]
) -> None:
    url = f"oci://{registry.host}/lost/run:v1"
    send(folder, url)
    report = registry.blob(digest_bytes((folder / "report.json").read_bytes()))
    content = report.read_bytes()
    report.write_bytes(content.replace(b"passed", b"PASSED"))
    with pytest.raises(ModelExportError) as caught:
        check_registry(url, access, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    report.write_bytes(content)
    weights = registry.blob(digest_bytes((folder / "onnx-int4" / "model.onnx").read_bytes()))
    weights.rename(weights.with_name("away"))
    with pytest.raises(ModelExportError, match=r"onnx-int4/model\.onnx") as caught:
        check_registry(url, access, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "ARTIFACT_NOT_FOUND"
    weights.with_name("away").rename(weights)
    check_registry(url, access, trusted=TrustedKey(keys[1]))


INDEX = {"Content-Type": "application/vnd.oci.image.index.v1+json"}
DESCRIPTOR = {"mediaType": "a/b", "digest": "sha256:" + "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, INDEX, b"x" * (5 << 20)), "STORE_INVALID"),
        ((200, INDEX, b"no json"), "ARTIFACT_INVALID"),
        ((200, INDEX, b"[" * 100_000), "ARTIFACT_INVALID"),
        ((200, INDEX, b'{"manifests": 5}'), "ARTIFACT_INVALID"),
        ((200, INDEX, json.dumps({"manifests": [{**DESCRIPTOR, "size": -1}]}).encode()), "ARTIFACT_INVALID"),
        ((200, INDEX, json.dumps({"manifests": [{**DESCRIPTOR, "digest": "md5:1"}]}).encode()), "ARTIFACT_INVALID"),
        (
            (200, INDEX, json.dumps({"manifests": [{**DESCRIPTOR, "annotations": {"a": 1}}]}).encode()),
            "ARTIFACT_INVALID",
        ),
        ((200, INDEX, b'{"manifests": []}'), "ARTIFACT_INVALID"),
        ((200, {"Content-Type": "text/html"}, b"<html>"), "ARTIFACT_INVALID"),
        ((302, {"Location": "http://registry.example/elsewhere"}, b""), "STORE_INVALID"),
        ((302, {"Location": "file:///etc/passwd"}, b""), "STORE_INVALID"),
        ((302, {"Location": "/v2/hostile/run/manifests/v1"}, b""), "STORE_INVALID"),
        ((401, {"WWW-Authenticate": 'Bearer realm="gopher://x"'}, b""), "STORE_INVALID"),
        ((401, {"WWW-Authenticate": "Negotiate"}, b""), "STORE_DENIED"),
        ((418, {}, b'{"errors": [{"code": "\\u001b[31mRED", "message": "x\\u0000y"}]}'), "STORE_INVALID"),
    ],
)
def test_what_a_registry_answers_is_not_trusted(
    registry: RegistryServer, access: Access, answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "slipway.publishing.oci.transport.Transport.__init__.__kwdefaults__",
        {"insecure": False, "patience_seconds": 0.5},
    )
    change: Callable[[str, str], Any] = lambda method, path: answer if "manifests" in path else None  # noqa: E731
    with registry_proxy(registry.host, change=change) as (host, _), pytest.raises(ModelExportError) as caught:
        check_registry(f"oci://{host}/hostile/run:v1", access)
    assert caught.value.reason == reason
    assert "\x1b" not in str(caught.value)
    assert "\x00" not in str(caught.value)


def test_a_redirect_takes_no_password_along(registry: RegistryServer, folder: Path, send: Send, access: Access) -> None:
    send(folder, f"oci://{registry.host}/elsewhere/run:v1")
    with registry_proxy(registry.host) as (other, seen):
        asked = []

        def change(method: str, path: str) -> Any:
            if "/blobs/" in path and method == "GET":
                return 307, {"Location": f"http://{other}{path}"}, b""
            asked.append(path)
            return (401, {"WWW-Authenticate": 'Basic realm="x"'}, b"") if len(asked) == 2 else None

        named = {"SLIPWAY_REGISTRY_USER": USER, "SLIPWAY_REGISTRY_PASSWORD": PASSWORD}
        with registry_proxy(registry.host, change=change) as (host, first):
            check_registry(
                f"oci://{host}/elsewhere/run:v1", replace(access, environment={**access.environment, **named})
            )
        assert any(sent.startswith("Basic") for _, _, sent in first.requests)
        assert seen.count("GET", "/blobs/") >= 3
        assert not any(sent for _, _, sent in seen.requests)


def test_a_token_is_asked_for_and_sent(
    registry: RegistryServer, folder: Path, send: Send, access: Access, keys: tuple[Path, Path]
) -> None:
    asked: list[str] = []

    def service(_: str, path: str) -> Any:
        asked.append(path)
        return 200, {}, json.dumps({"token": "the.token"}).encode()

    with registry_proxy(registry.host, change=service) as (tokens, service_seen):
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{tokens}/token",service="tests"'}
        first = []

        def change(method: str, path: str) -> Any:
            if "/v2/token/" in path and not first:
                first.append(path)
                return 401, challenge, b""
            return None

        named = {"SLIPWAY_REGISTRY_USER": USER, "SLIPWAY_REGISTRY_PASSWORD": PASSWORD}
        with registry_proxy(registry.host, change=change) as (host, seen):
            wanted = replace(access, environment={**access.environment, **named})
            publish(folder, [f"oci://{host}/token/run:v1"], access=wanted, key=keys[0])
        assert "scope=repository%3Atoken%2Frun%3Apull%2Cpush" in asked[0]
        assert service_seen.requests[0][2].startswith("Basic")
        assert {sent for _, path, sent in seen.requests if "manifests" in path} == {"Bearer the.token"}


def test_the_proof_is_attached_to_the_index(registry: RegistryServer, folder: Path, send: Send) -> None:
    done = send(folder, f"oci://{registry.host}/attached/run:v1").destinations[0]
    tag = "sha256-" + done.address.rpartition(":")[2]
    raw = (
        registry.folder / "data/docker/registry/v2/repositories/attached/run/_manifests/tags" / tag / "current" / "link"
    )
    index = json.loads(registry.blob(raw.read_text()).read_bytes())
    kinds = {each["annotations"]["org.opencontainers.image.title"]: each["artifactType"] for each in index["manifests"]}
    assert set(kinds) == {STATEMENT, BOM, SIGNATURE}
    assert kinds[SIGNATURE] == "application/vnd.dev.sigstore.bundle.v0.3+json"
