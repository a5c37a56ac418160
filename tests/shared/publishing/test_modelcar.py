"""Outputs as images for KServe: what a registry holds, what another program reads, and that they start as KServe starts them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.oci import base, modelcar
from slipway.publishing.oci.address import parse_target
from slipway.publishing.oci.reading import check_registry
from slipway.publishing.oci.tars import TarLayer
from slipway.publishing.publisher import Publishing, publish
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.trust import TrustedKey
from support.commands.delivered_folders import files_below, make_delivered
from support.servers.image_layouts import Layout
from support.servers.image_uploads import INDEX, MANIFEST, Uploader
from support.servers.registry_server import TOOLS, RegistryServer, needs_registry, needs_skopeo, registry_proxy, skopeo

pytest.importorskip("model_signing", reason="the extra publish is not installed")
pytestmark = needs_registry

Send = Callable[..., Publishing]
BUSYBOX = TOOLS / "bin" / "busybox"


def image_of(source: str, target: Path, *more: str) -> tuple[dict[str, Any], list[bytes]]:
    """Copy an image with skopeo; return its configuration and its layers without compression."""
    layout = Layout(source, target, *more)
    layers = [layout.blob(layer["digest"]) for layer in layout.manifest["layers"]]
    plain = [gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data for data in layers]
    assert layout.config["rootfs"] == {"type": "layers", "diff_ids": [digest_bytes(data) for data in plain]}
    return layout.config, plain


def members(layers: list[bytes]) -> dict[str, bytes]:
    files = {}
    for data in layers:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as tar:  # as KServe's initializer reads it
            for entry in tar:
                assert (entry.uid, entry.gid, entry.mtime, entry.isfile() or entry.isdir()) == (0, 0, 0, True)
                assert entry.mode == (0o644 if entry.isfile() else 0o755)
                assert entry.name.partition("/")[0] == "models"
                if entry.isfile():
                    content = tar.extractfile(entry)
                    assert content is not None
                    files[entry.name.removeprefix("models/")] = content.read()
    return files


@needs_skopeo
def test_every_output_is_an_image_for_each_platform(
    registry: RegistryServer, folder: Path, send: Send, access: Access, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    url = f"oci://{registry.host}/cars/run:v1"
    done = send(folder, f"{url}?modelcar").destinations[0]
    cars = done.details["modelcars"]
    assert cars.keys() == {"gguf-q4_k_m", "onnx-int4"}
    for name, car in cars.items():
        assert car["tag"] == f"v1-{name}-modelcar"
        place = f"docker://{registry.host}/cars/run:{car['tag']}"
        raw = skopeo("inspect", "--tls-verify=false", "--raw", place)
        assert (digest_bytes(raw.encode()), car["uri"]) == (
            car["digest"],
            f"oci+native://{registry.host}/cars/run@{car['digest']}",
        )
        entries = json.loads(raw)["manifests"]
        assert [each["platform"] for each in entries] == [
            {"architecture": each, "os": "linux"} for each in ("amd64", "arm64")
        ]
        layers = {}
        for platform in ("amd64", "arm64"):
            config, layers[platform] = image_of(place, tmp_path / name / platform, "--override-arch", platform)
            assert (config["architecture"], config["os"]) == (platform, "linux")
            assert config["config"]["Labels"]["slipway.index"] == done.address.partition("@")[2]
            shown = json.loads(skopeo("--override-arch", platform, "inspect", "--tls-verify=false", place))
            assert (shown["Architecture"], shown["Labels"]["slipway.output"]) == (platform, name)
        assert layers["amd64"] == layers["arm64"], "the files are there once"
        assert members(layers["amd64"]) == files_below(folder / name)
    _, checked = check_registry(url, access, trusted=TrustedKey(keys[1]))
    assert checked.verdict == "passed", "the signed index is as without them"
    assert send(folder, url).destinations[0].address == done.address


def test_images_are_the_same_every_time_and_sent_once(
    registry: RegistryServer, folder: Path, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelcar, "_LARGE_BYTES", 2000)  # real ones would take files of tens of megabytes
    with registry_proxy(registry.host) as (host, seen):
        first = send(folder, f"oci://{host}/same/run:v1?modelcar").destinations[0]
        seen.requests.clear()
        again = send(folder, f"oci://{host}/same/run:v1?modelcar").destinations[0]
        assert (again.sent_bytes, again.details) == (0, first.details)
        assert seen.count("POST", "uploads") == 0
        seen.requests.clear()
        (folder / "onnx-int4" / "model.onnx").touch()
        moved = folder.rename(folder.with_name("elsewhere"))
        other = send(moved, f"oci://{host}/same/run:v2?modelcar").destinations[0]
        assert other.details["modelcars"]["onnx-int4"]["digest"] == first.details["modelcars"]["onnx-int4"]["digest"]
        assert seen.count("POST", "uploads") == 0, "neither place nor time of the files is in it"


def test_images_are_added_to_what_is_there(registry: RegistryServer, folder: Path, send: Send) -> None:
    first = send(folder, f"oci://{registry.host}/added/run:v1").destinations[0]
    assert "modelcars" not in first.details
    second = send(folder, f"oci://{registry.host}/added/run:v1?modelcar").destinations[0]
    assert (second.address, second.details["modelcars"].keys()) == (first.address, {"gguf-q4_k_m", "onnx-int4"})
    release = prepare_release(folder)
    cars, _ = modelcar.plan_cars(release)
    layers = [layer for car in cars for layer in car.layers]
    for layer in layers:
        layer.measure(lambda: None)
    assert second.sent_bytes == sum(layer.size_bytes for layer in layers), "the files themselves are there"
    assert second.kept_bytes == first.sent_bytes
    again = send(folder, f"oci://{registry.host}/added/run:v1?modelcar").destinations[0]
    assert (again.sent_bytes, again.kept_bytes) == (0, first.sent_bytes + second.sent_bytes)


def test_an_upload_of_a_tar_that_breaks_goes_on(
    registry: RegistryServer, tmp_path: Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks and layers of the real size would take files of hundreds of megabytes.
    monkeypatch.setattr("slipway.publishing.oci.registry.CHUNK_BYTES", 100_000)
    monkeypatch.setattr(modelcar, "_LARGE_BYTES", 100_000)
    folder = make_delivered(tmp_path / "large", size=450_000)
    done = publish(folder, [f"oci://{registry.host}/whole/cars:v1?modelcar"], access=access).destinations[0]
    with registry_proxy(registry.host, break_every=9) as (host, seen):
        broken = publish(folder, [f"oci://{host}/broken/cars:v1?modelcar"], access=access).destinations[0]
        assert seen.broken > 1
    assert broken.details["modelcars"]["onnx-int4"]["digest"] == done.details["modelcars"]["onnx-int4"]["digest"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(registry: RegistryServer, tmp_path: Path, access: Access) -> None:
    folder = make_delivered(tmp_path / "large", size=48 << 20)
    tracemalloc.start()
    try:
        publish(folder, [f"oci://{registry.host}/memory/cars:v1?modelcar"], access=access)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_a_tar_is_read_at_any_place_and_refuses_a_file_that_changes(folder: Path) -> None:
    release = prepare_release(folder)
    long_name = "models/" + "/".join(["a-long-name-of-a-folder"] * 8) + "/é.json"
    files = [("models/x/model.onnx", release.file("onnx-int4/model.onnx")), (long_name, release.file("report.json"))]
    layer = TarLayer(files)
    layer.measure(lambda: None)
    with layer.opened() as read_at:
        whole = b"".join(iter_pieces(read_at, 1 << 20))
        assert (len(whole), digest_bytes(whole)) == (layer.size_bytes, layer.digest)
        for size, offset in ((700, 0), (1, len(whole) - 1), (100, 513), (5000, 600)):
            piece = read_at(size, offset)
            assert piece == whole[offset : offset + len(piece)] != b""
        assert read_at(10, len(whole)) == b""
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        assert [entry.name for entry in tar if entry.isfile()] == [files[0][0], long_name]
    assert hashlib.sha256(whole).hexdigest() == layer.digest.removeprefix("sha256:")
    os.utime(folder / "report.json", (1, 1))
    changed = TarLayer(files)
    with pytest.raises(ModelExportError) as caught:
        changed.measure(lambda: None)
    assert caught.value.reason == "FILE_ERROR"


def iter_pieces(read_at: Callable[[int, int], bytes], size: int) -> list[bytes]:
    pieces, offset = [], 0
    while piece := read_at(size, offset):
        pieces.append(piece)
        offset += len(piece)
    return pieces


def test_many_large_files_share_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelcar, "_LARGE_BYTES", 0)
    monkeypatch.setattr(modelcar, "_MOST_LAYERS", 2)
    release = prepare_release(folder)
    cars, by_content = modelcar.plan_cars(release)
    assert [len(car.layers) for car in cars] == [2, 2]
    assert sum(map(len, by_content.values())) == 4


@pytest.mark.parametrize(
    "option",
    [
        "?modelcars",
        "?modelcar=",
        "?modelcar=UPPER",
        "?modelcar=a:b:c",
        "?modelcar=../x",
        "?modelcar&x=secret",
        "?model",
    ],
)
def test_what_is_no_option_is_refused(option: str, folder: Path, access: Access) -> None:
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [f"oci://127.0.0.1:1/a{option}"], access=access)
    assert (caught.value.reason, "secret" in str(caught.value)) == ("DESTINATION_INVALID", False)


def test_an_address_names_a_base_of_the_same_registry() -> None:
    target = parse_target("oci://host:5000/a/b:v1?modelcar=base/busybox:1.37")
    assert (str(target.address), str(target.base)) == ("oci://host:5000/a/b:v1", "oci://host:5000/base/busybox:1.37")
    assert parse_target("oci://host/a").modelcar is False


def shell_layer() -> bytes:
    """A layer with a shell, or something in its place where there is none."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        program = BUSYBOX.read_bytes() if BUSYBOX.exists() else b"no shell"
        entry = tarfile.TarInfo("bin/busybox")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
        for name in ("sh", "ls", "ln", "sleep", "mkdir", "echo", "cat", "["):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return gzip.compress(data.getvalue(), mtime=0)


@needs_skopeo
def test_an_image_begins_with_its_base(registry: RegistryServer, folder: Path, send: Send, tmp_path: Path) -> None:
    uploader = Uploader(registry, "base/shell")
    layer = shell_layer()
    entries = [
        {**uploader.image(layer, each), "platform": {"os": "linux", "architecture": each}}
        for each in ("arm64", "amd64", "s390x")
    ]
    uploader.manifest({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, "1")
    done = send(folder, f"oci://{registry.host}/based/run:v1?modelcar=base/shell:1").destinations[0]
    assert done.details["modelcars"]["onnx-int4"]["uri"].startswith("oci://")
    tag = done.details["modelcars"]["onnx-int4"]["tag"]
    place = f"docker://{registry.host}/based/run:{tag}"
    listed = json.loads(skopeo("inspect", "--tls-verify=false", "--raw", place))["manifests"]
    assert [each["platform"]["architecture"] for each in listed] == ["amd64", "arm64"]
    config, layers = image_of(place, tmp_path / "layout", "--override-arch", "amd64")
    assert config["config"]["Env"] == ["PATH=/bin"]
    assert layers[0] == gzip.decompress(layer)
    assert members(layers[1:]) == files_below(folder / "onnx-int4")
    if BUSYBOX.exists() and os.geteuid() == 0:
        root = tmp_path / "root"
        for data in layers:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                tar.extractall(root, filter="tar")
        # What KServe starts: first this check, then a link through the process to its files.
        check = '[ -d /models ] && [ "$(ls -A /models)" ] && echo OK'
        assert chroot(root, check) == "OK\n"
        link = "mkdir -p /mnt && ln -sf /models /mnt/models && cat /mnt/models/nested/config.json"
        assert json.loads(chroot(root, link)) == {"name": "onnx-int4"}


def chroot(root: Path, script: str) -> str:
    program = shutil.which("chroot") or "/usr/sbin/chroot"
    words = [program, str(root), "/bin/sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/bin"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_tag_moves_last(registry: RegistryServer, folder: Path, send: Send) -> None:
    Uploader(registry, "base/one").image(shell_layer(), "amd64", "1")
    with registry_proxy(registry.host) as (host, seen):
        send(folder, f"oci://{host}/last/run:v1?modelcar=base/one:1")
    writes = [path for method, path, _ in seen.requests if method in ("POST", "PATCH", "PUT")]
    tags = [path.rpartition("/")[2] for path in writes[-5:]]
    assert {"v1-gguf-q4_k_m", "v1-onnx-int4", "v1-gguf-q4_k_m-modelcar", "v1-onnx-int4-modelcar"} == set(tags[:-1])
    assert tags[-1] == "v1"
    assert not any("/manifests/v1" in path for path in writes[:-5])


def test_a_base_of_one_platform_and_bases_that_are_none(
    registry: RegistryServer, folder: Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = Uploader(registry, "base/odd")
    layer = shell_layer()
    uploader.image(layer, "arm64", "one")
    uploader.image(layer, "s390x", "other-processor")
    uploader.image(layer, "amd64", "windows", os="windows")
    uploader.image(layer, "amd64", "lying", rootfs={"type": "layers", "diff_ids": []})
    uploader.manifest({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}, "empty")
    other = {**uploader.image(layer, "arm64"), "platform": {"os": "linux", "architecture": "amd64"}}
    uploader.manifest({"schemaVersion": 2, "mediaType": INDEX, "manifests": [other]}, "other-platform")
    config = uploader.blob(b"[]", "application/vnd.oci.image.config.v1+json")
    artifact = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config}
    uploader.manifest({**artifact, "layers": [uploader.blob(b"x", "text/plain")]}, "no-tar")
    uploader.manifest({**artifact, "layers": []}, "no-config")
    done = publish(folder, [f"oci://{registry.host}/odd/run:v1?modelcar=base/odd:one"], access=access).destinations[0]
    assert done.details["modelcars"]
    (folder / "bom.cdx.json").unlink()
    refusals = {
        "absent": "ARTIFACT_NOT_FOUND",
        **dict.fromkeys(
            ("other-processor", "other-platform", "windows", "lying", "empty", "no-tar", "no-config"),
            "ARTIFACT_INVALID",
        ),
    }
    for tag, reason in refusals.items():
        with pytest.raises(ModelExportError) as caught:
            publish(folder, [f"oci://{registry.host}/odd/run:v2?modelcar=base/odd:{tag}"], access=access)
        assert caught.value.reason == reason, tag
        assert not (folder / "bom.cdx.json").exists(), "refused before anything was done"
    monkeypatch.setattr(base, "_LARGEST_LAYER", len(layer) - 1)  # a real one would have 64 MiB
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [f"oci://{registry.host}/odd/run:v2?modelcar=base/odd:one"], access=access)
    assert (caught.value.reason, (folder / "bom.cdx.json").exists()) == ("LIMIT_EXCEEDED", False)
