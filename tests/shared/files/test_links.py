"""Links in somebody's folder: those that stay inside are followed, all others are refused by name, everywhere."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipway.artifacts.files import folder_files
from slipway.artifacts.local import LocalStore
from slipway.errors import ArtifactError, CheckpointValidationError
from slipway.files.checksums import verify_directory, write_checksums
from slipway.files.paths import all_files, file_in, open_real, open_unlinked
from slipway.model.model_files import copy_companions, model_files, travelling_files
from slipway.model.runs.checkpoints import find_checkpoint, list_checkpoints
from support.commands.cli import run_here
from support.models import tiny_models

SECRET = "of this machine, and nobody else's"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "secret.jinja").write_text(SECRET)
    return folder / "secret.jinja"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny_models.make_checkpoint(tiny_models.make_base(folder / "base"), folder / "run", step=3)
    return folder


@pytest.fixture
def model(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def checkpoint(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run")) / "checkpoint-3"


def refused(call: Callable[[], object]) -> ArtifactError:
    with pytest.raises(ArtifactError) as raised:
        call()
    assert raised.value.reason == "LINK_OUTSIDE"
    return raised.value


def test_a_link_stays_in_its_folder_or_is_refused_by_name(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_text("w")
    (folder / "deep" / "same").symlink_to("../weights")
    assert file_in(folder, "deep/same") == folder / "weights"
    assert dict(all_files(folder)) == {"deep/same": folder / "weights", "weights": folder / "weights"}
    for number, target in enumerate(("/etc/passwd", secret, "../private/secret.jinja", "../nothing", "deep/../..")):
        name = f"odd-{number}"
        (folder / name).symlink_to(target)
        assert name in str(refused(lambda name=name: file_in(folder, name)))
        assert name in str(refused(lambda: folder_files(folder)))
        (folder / name).unlink()
    (folder / "there").symlink_to(folder / "weights")
    (folder / "and-back").symlink_to(folder / "there")
    assert file_in(folder, "and-back") == folder / "weights"


def test_a_folder_that_is_named_by_a_link_is_the_one_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "weights").write_text("w")
    (tmp_path / "real" / "same").symlink_to("weights")
    (tmp_path / "latest").symlink_to("real")
    assert folder_files(tmp_path / "latest") == dict.fromkeys(("same", "weights"), tmp_path / "real" / "weights")


def test_files_behind_a_linked_folder_are_outside_too(tmp_path: Path, secret: Path, checkpoint: Path) -> None:
    (checkpoint / "additional_chat_templates").symlink_to(secret.parent)
    assert "secret.jinja" in str(refused(lambda: travelling_files(checkpoint)))
    assert "additional_chat_templates" in str(refused(lambda: folder_files(checkpoint)))


def hub_snapshot(cache: Path) -> Path:
    repository = cache / "models--owner--base"
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / "deep").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1234").write_text("w")
    (snapshot / "weights").symlink_to("../../blobs/1234")
    (snapshot / "deep" / "weights").symlink_to("../../../blobs/1234")
    return snapshot


def test_a_folder_that_is_only_called_snapshots_is_no_cache(tmp_path: Path) -> None:
    run = tmp_path / "disk" / "snapshots" / "run"
    run.mkdir(parents=True)
    (tmp_path / "disk" / "blobs").mkdir()
    (tmp_path / "disk" / "blobs" / "1234").write_text("w")
    (run / "weights").symlink_to("../../blobs/1234")
    assert "weights" in str(refused(lambda: file_in(run, "weights")))


def test_a_snapshot_of_the_hubs_cache_leads_to_its_own_blobs_and_nowhere_else(tmp_path: Path, secret: Path) -> None:
    snapshot, other = hub_snapshot(tmp_path / "cache"), hub_snapshot(tmp_path / "other")
    blob = tmp_path / "cache" / "models--owner--base" / "blobs" / "1234"
    assert folder_files(snapshot) == {"deep/weights": blob, "weights": blob}
    assert folder_files(snapshot / "deep") == {"weights": blob}
    (snapshot / "odd").symlink_to(other / "weights")
    assert "odd" in str(refused(lambda: folder_files(snapshot)))
    (snapshot / "odd").unlink()
    (blob.parent / "1234").unlink()
    blob.parent.rmdir()
    blob.parent.symlink_to(secret.parent)  # what is called blobs, and is a link itself
    (snapshot / "weights").unlink()
    (snapshot / "weights").symlink_to("../../blobs/secret.jinja")
    assert "weights" in str(refused(lambda: file_in(snapshot, "weights")))


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "tokenizer.json", "adapter_config.json", "adapter_model.safetensors", "trainer_state.json"],
)
def test_a_checkpoint_with_a_link_out_of_it_is_refused_before_it_is_read(
    checkpoint: Path, secret: Path, name: str
) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(secret)
    with pytest.raises(CheckpointValidationError, match=name) as raised:
        find_checkpoint(checkpoint)
    assert raised.value.reason == "LINK_OUTSIDE"
    assert SECRET not in str(raised.value)
    (found,) = list_checkpoints(checkpoint.parent)
    assert [problem.reason for problem in found.problems] == ["LINK_OUTSIDE"]


def test_a_run_does_not_lead_to_another_runs_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "private" / "checkpoint-9"))
    (checkpoint.parent / "checkpoint-9").symlink_to(other)
    found = find_checkpoint(checkpoint.parent)
    assert found.path == checkpoint
    assert any("checkpoint-9" in warning for warning in found.warnings)
    (checkpoint.parent / "checkpoint-9").unlink()
    (checkpoint.parent / "checkpoint-9").symlink_to("checkpoint-3")
    assert find_checkpoint(checkpoint.parent).path.name == "checkpoint-9"
    assert find_checkpoint(other).path == other, "whoever names it wants it"


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"]
)
def test_a_base_model_with_a_link_out_of_it_is_refused(model: Path, secret: Path, tmp_path: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    assert name in str(refused(lambda: model_files(model)))
    if name != "model.safetensors":
        (tmp_path / "copy").mkdir()
        refused(lambda: copy_companions(model, tmp_path / "copy"))


@pytest.mark.parametrize("command", ["export", "export --plan", "checkpoints", "push", "stage", "verify"])
def test_every_command_refuses_it_and_delivers_nothing(
    command: str,
    checkpoint: Path,
    model: Path,
    secret: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    write_checksums(checkpoint, known={})
    (checkpoint / "chat_template.jinja").symlink_to(secret)
    export = ("--checkpoint", checkpoint, "--base-model", model, "--out", tmp_path / "out", "--json")
    words = {
        "export": ("export", *export),
        "export --plan": ("export", "--plan", *export),
        "checkpoints": ("checkpoints", checkpoint, "--json"),
        "push": ("push", checkpoint, "--json"),
        "stage": (
            "stage",
            "support.stages.plain:ECHO",
            "--input",
            f"in={checkpoint}",
            "--out",
            tmp_path / "out",
            "--json",
        ),
        "verify": ("verify", checkpoint, "--json"),
    }
    code = run_here(*words[command])
    out = capfd.readouterr().out
    assert (code, "LINK_OUTSIDE" in out, "chat_template.jinja" in out) == (
        0 if command == "checkpoints" else 3,
        True,
        True,
    )
    assert not (tmp_path / "out").exists()
    assert not [
        path for path in (tmp_path / "home").rglob("*") if path.is_file() and SECRET in path.read_text("latin-1")
    ]


def test_a_delivered_folder_is_not_verified_through_a_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "out" / "pytorch").mkdir(parents=True)
    (tmp_path / "out" / "pytorch" / "config.json").write_text(SECRET)
    write_checksums(tmp_path / "out", known={})
    assert verify_directory(tmp_path / "out") == (1, [])
    (tmp_path / "out" / "pytorch" / "config.json").unlink()
    (tmp_path / "out" / "pytorch" / "config.json").symlink_to(secret)  # with the very bytes
    assert "config.json" in str(refused(lambda: verify_directory(tmp_path / "out")))


def test_a_link_that_takes_a_files_place_after_the_check_is_not_followed(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "secret.jinja").write_text("harmless")
    files = folder_files(folder)
    store = LocalStore(tmp_path / "store")
    for swap in (folder / "deep" / "secret.jinja", folder / "deep"):
        swap.rename(tmp_path / "before")
        swap.symlink_to(secret if swap.suffix else secret.parent)
        refused(lambda: open_real(files["deep/secret.jinja"]))
        refused(lambda: store.put_files(files))
        swap.unlink()
        (tmp_path / "before").rename(swap)
    assert store.manifest(store.put_files(files)).size_bytes == len("harmless")


def test_what_is_stored_is_what_was_hashed_however_often_its_name_changes_hands(tmp_path: Path, secret: Path) -> None:
    """A name that leads to the file, to a link to a secret and to another file, in turn, while it is stored over and over."""
    folder, kept = tmp_path / "model", (b"a" * 3_000_000, b"b" * 3_000_000)
    folder.mkdir()
    for name, content in zip("ab", kept, strict=True):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c").symlink_to(secret)
    (folder / "weights").hardlink_to(tmp_path / "a")
    files = folder_files(folder)
    stopped = threading.Event()

    def swap() -> None:
        while not stopped.is_set():
            for name in "abc":
                new = folder / "new"
                new.unlink(missing_ok=True)  # renaming one name of a file to another leaves both
                os.link(tmp_path / name, new, follow_symlinks=False)
                new.replace(folder / "weights")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        stored = list(_stored(tmp_path, files))
    finally:
        stopped.set()
        thread.join()
    assert stored, "it was a file at least once"
    assert set(stored) <= set(kept)


def _stored(tmp_path: Path, files: dict[str, Path]) -> Iterator[bytes]:
    for number in range(25):
        store = LocalStore(tmp_path / f"store-{number}")
        try:
            digest = store.put_files(files)
        except ArtifactError as error:
            assert error.reason in {"LINK_OUTSIDE", "FILE_ERROR"}
            continue
        yield (LocalStore(store.root).fetch(digest, tmp_path / f"fetched-{number}") / "weights").read_bytes()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("opened", [open_real, open_unlinked])
def test_a_pipe_is_not_waited_for(tmp_path: Path, opened: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises((ArtifactError, IsADirectoryError)):
            opened(path)
    with pytest.raises(ArtifactError) as raised:
        file_in(tmp_path, "pipe")
    assert raised.value.reason == "ARTIFACT_INVALID"
