"""Manifests that try to write outside their folder, over each other, or what no file system takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.artifacts import LocalStore, Manifest
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.manifest import check_path
from slipway.errors import ArtifactError

DIGEST = digest_bytes(b"")

UNSAFE = {
    "empty": "",
    "absolute": "/etc/passwd",
    "parent": "../x",
    "parent inside": "a/../../x",
    "parent at the end": "a/..",
    "dot": "a/./b",
    "double slash": "a//b",
    "trailing slash": "a/",
    "backslash": "a\\b",
    "Windows parent": "..\\x",
    "UNC": "\\\\host\\share",
    "drive": "C:/x",
    "drive relative": "c:x",
    "NUL": "a\0b",
    "line feed": "a\nb",
    "escape": "a\x1b[2Jb",
    "delete": "a\x7f",
    "half a surrogate pair": "a\ud800b",
    "long name": "x" * 256,
    "long name in bytes": "é" * 128,
    "long path": "/".join(["x" * 100] * 11),
}
SAFE = [
    "a",
    "a/b.json",
    "..a",
    "a..",
    "...",
    "é",
    "模型/weights.safetensors",
    "a b",
    "x" * 255,
    ".gitattributes",
    "step:1",
]


def document(*paths: str, size: object = 0) -> bytes:
    files = [{"path": path, "size_bytes": size, "digest": DIGEST, "media_type": "x"} for path in paths]
    return json.dumps({"version": 1, "files": files}).encode()


@pytest.mark.parametrize("path", UNSAFE.values(), ids=UNSAFE.keys())
def test_unsafe_paths_are_refused(path: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_bytes(document(path))
    assert caught.value.reason == "ARTIFACT_INVALID"
    str(caught.value).encode()  # it can be printed
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("path", SAFE)
def test_usual_paths_are_taken(path: str) -> None:
    assert Manifest.from_bytes(document(path)).files[0].path == path


@pytest.mark.parametrize(
    "paths",
    [
        ("a", "a"),
        ("caf\u00e9", "cafe\u0301"),
        ("\u212b/x", "\u00c5/x"),
        ("a", "a/b"),
        ("caf\u00e9", "cafe\u0301/x"),
        ("a/b/c", "a/b"),
    ],
)
def test_paths_that_would_be_one_file_somewhere_are_refused(paths: tuple[str, str]) -> None:
    for order in (paths, paths[::-1]):
        with pytest.raises(ArtifactError) as caught:
            Manifest.from_bytes(document(*order))
        assert caught.value.reason == "ARTIFACT_INVALID"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"version": 2, "files": []}',
        b'{"version": 1, "files": [1]}',
        b'{"version": 1, "files": {"path": "a"}}',
        document("a", size=-1),
        document("a", size="many"),
        document("a").replace(DIGEST.encode(), b"sha256:../../x"),
        document("a").replace(DIGEST.encode(), b"md5:00"),
        b"\xff\xfe",
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_bytes(data)
    assert caught.value.reason == "ARTIFACT_INVALID"


def test_a_version_of_any_length_is_named_shortly() -> None:
    with pytest.raises(ArtifactError, match="manifest version") as caught:
        Manifest.from_bytes(json.dumps({"version": ["x" * 1000] * 1000, "files": []}).encode())
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "character",
    ["\x7f", "\x85", "\xad", "\u200b", "\u200d", "\u2028", "\u2029", "\u202e", "\ufeff", "\U000e0001", "\ud83d"],
)
def test_a_path_has_no_character_that_hides_or_reverses_text(character: str) -> None:
    with pytest.raises(ArtifactError, match="not a safe path") as caught:
        check_path(f"model{character}txt.exe")
    assert caught.value.reason == "ARTIFACT_INVALID"
    for fine in ("modèle.txt", "模型.txt", "مدل.txt", "👩.txt"):
        check_path(fine)


@given(st.text(max_size=40))
def test_a_path_that_is_taken_stays_inside(path: str) -> None:
    try:
        check_path(path)
    except ArtifactError:
        return
    folder = Path("/artifact/folder")
    assert (folder / path).resolve().is_relative_to(folder)
    assert (folder / path) != folder


def test_a_link_in_a_folder_is_not_followed_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError) as caught:
        LocalStore(tmp_path / "store").put(folder)
    assert caught.value.reason == "ARTIFACT_INVALID"
