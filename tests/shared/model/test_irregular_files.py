"""Only regular files are read: a pipe, a device, a socket or a folder in their place is refused, and a file is read up to its limit."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipway.errors import CheckpointValidationError
from slipway.files.checksums import read_checksums
from slipway.files.json_documents import read_json
from slipway.files.regular_file import open_regular, read_regular
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import has_chat_template, resolve_base_model
from slipway.model.runs.checkpoints import find_checkpoint, inspect_checkpoint, read_adapter_config
from slipway.model.safetensors_file import read_index, read_safetensors
from support.hostile.json_grammar import answer


@contextmanager
def special(path: Path, kind: str) -> Iterator[None]:
    """A file that is none, at a path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)  # binding one limits the path's length
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    yield


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("adapter_config.json", read_adapter_config),
        ("trainer_state.json", inspect_checkpoint),
        ("config.json", ModelConfig.read),
        ("tokenizer_config.json", has_chat_template),
        ("model.safetensors.index.json", lambda folder: read_index(folder / "model.safetensors.index.json")),
        ("x.safetensors", lambda folder: read_safetensors(folder / "x.safetensors")),
        ("MANIFEST.sha256", read_checksums),
        ("adapter_model.safetensors", find_checkpoint),
    ],
)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, name: str, read: Callable[[Path], object]) -> None:
    with special(tmp_path / name, kind):
        answer(lambda: read(tmp_path), megabytes=10)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_a_configuration_that_is_no_regular_file_is_invalid(tmp_path: Path, kind: str) -> None:
    with (
        special(tmp_path / "adapter_config.json", kind),
        pytest.raises(CheckpointValidationError, match=kind) as caught,
    ):
        read_adapter_config(tmp_path)
    assert caught.value.reason == "ADAPTER_CONFIG_INVALID"


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_named(tmp_path: Path, kind: str) -> None:
    with special(tmp_path / "x", kind), pytest.raises(OSError, match="not a regular file") as caught:
        open_regular(tmp_path / "x")
    assert kind in str(caught.value)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", largest=5) == b"12345"
    with open_regular(tmp_path / "x") as file:
        assert isinstance(file, io.BufferedReader), "reads on where the system gives fewer bytes, as FUSE may"
    with pytest.raises(OSError, match="larger than 4"):
        read_regular(tmp_path / "x", largest=4)
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger"):
        answer(lambda: read_json(tmp_path / "x"), megabytes=1)


@pytest.mark.parametrize(
    "kind", ["pipe", "device", "socket", "/etc", "../../../etc", "..", "a\0b", "x" * 10_000, "\udcff"]
)
def test_a_reference_of_the_hubs_cache_names_a_snapshot_or_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    reference = tmp_path / "models--o--n" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    if kind in {"pipe", "device", "socket"}:
        with special(reference, kind):
            pass
    else:
        reference.write_bytes(kind.encode("utf-8", "surrogateescape"))
    found = answer(lambda: resolve_base_model("o/n"))
    assert isinstance(found, CheckpointValidationError)
    assert (found.reason, "names no snapshot" in found.message) == ("BASE_MODEL_INVALID", True)
