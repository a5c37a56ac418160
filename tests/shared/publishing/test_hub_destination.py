"""Publishing to the Hugging Face hub: one commit with all files, private unless said otherwise, and nothing sent twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.errors import ConfigurationError, ModelExportError, StageError
from slipway.publishing.destination import Access
from slipway.publishing.hub.address import parse_address
from slipway.publishing.hub.reading import check_hub
from slipway.publishing.publisher import Publishing, publish, publish_each, reach_destination
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.trust import TrustedKey
from support.commands import report_parts
from support.commands.cli import in_process
from support.commands.delivered_folders import files_below, make_delivered
from support.servers.free_ports import free_port
from support.servers.hub_uploads import FIRST, TOKEN, HubUploads

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubUploads]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read from the environment at import
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubUploads() as running:
        yield running


@pytest.fixture
def on_hub(access: Access, hub: HubUploads) -> Access:
    settings = access.settings.model_copy(update={"hub_endpoint": hub.endpoint})
    return replace(access, settings=settings, environment={**access.environment, "HF_TOKEN": TOKEN})


def send(folder: Path, url: str, access: Access) -> Publishing:
    return publish(folder, [url], access=access, licence="MIT")


def refusal(folder: Path, url: str, access: Access) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        send(folder, url, access)
    return caught.value


@pytest.mark.parametrize("chunk", [0, 700])
def test_one_commit_has_all_files_and_nothing_is_sent_twice(
    hub: HubUploads, folder: Path, on_hub: Access, chunk: int
) -> None:
    hub.chunk = chunk
    (done,) = send(folder, "hf://me/qwen3", on_hub).destinations
    repository = hub.repositories["me/qwen3"]
    assert repository.files() == {**files_below(folder), **FIRST}
    assert repository.private
    assert repository.messages == ["initial commit", "qwen3-finetuned: export abc123"]
    assert done.address == f"hf://me/qwen3@{repository.branches['main']}"
    assert done.details == {"revision": "main", "private": True}
    assert (done.sent_bytes, done.kept_bytes) == (sum(map(len, files_below(folder).values())), 0)
    assert "README.md" in repository.files()
    before = len(hub.sent())
    (again,) = send(folder, "hf://me/qwen3", on_hub).destinations
    assert len(hub.sent()) == before
    assert (again.address, again.sent_bytes, again.kept_bytes) == (done.address, 0, done.sent_bytes)
    assert len(repository.commits) == 2


def test_another_export_replaces_it_and_what_only_the_earlier_had_goes(
    hub: HubUploads, folder: Path, on_hub: Access, tmp_path: Path
) -> None:
    send(folder, "hf://org/qwen3", on_hub)
    repository = hub.repositories["org/qwen3"]
    repository.commit("main", {**repository.files(), "NOTES.md": b"mine"}, "a note of the owner")
    other = make_delivered(tmp_path / "other", report_parts.output("gguf-q4_k_m", 0.004))
    blobs = len(hub.blobs)
    send(other, "hf://org/qwen3", on_hub)
    assert repository.files() == {**files_below(other), **FIRST, "NOTES.md": b"mine"}
    assert not any(name.startswith("onnx-int4/") for name in repository.files())
    assert len(hub.blobs) > blobs


def test_a_branch_is_made_and_the_main_one_is_left_alone(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    (done,) = send(folder, "hf://me/branched@v1/rc", on_hub).destinations
    repository = hub.repositories["me/branched"]
    assert repository.files("v1/rc").keys() > files_below(folder).keys()
    assert repository.files() == FIRST
    assert done.details["revision"] == "v1/rc"


def test_a_repository_is_public_only_if_that_is_said(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    (done,) = send(folder, "hf://me/open?public", on_hub).destinations
    assert (hub.repositories["me/open"].private, done.details["private"]) == (False, False)
    error = refusal(folder, "hf://me/open", on_hub)
    assert (error.reason, "the repository is public" in str(error)) == ("DESTINATION_INVALID", True)
    with pytest.raises(ConfigurationError, match="the repository is public"):
        reach_destination("hf://me/open", on_hub)
    hub.make("me/closed", private=True)
    (kept,) = send(folder, "hf://me/closed?public", on_hub).destinations
    assert kept.details["private"], "an existing repository stays as it is"


@pytest.mark.parametrize(
    "there", [{"model.safetensors": b"of somebody else"}, {"MANIFEST.sha256": b"no list"}, {"MANIFEST.sha256": b"\xff"}]
)
def test_a_repository_of_something_else_is_left_alone(
    hub: HubUploads, folder: Path, on_hub: Access, there: dict[str, bytes]
) -> None:
    made = hub.make("me/other", files=there)
    assert refusal(folder, "hf://me/other", on_hub).reason == "OUTPUT_EXISTS"
    assert len(made.commits) == 1
    assert hub.sent() == []


def test_what_was_sent_before_an_interruption_is_not_sent_again(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    hub.answers["/commit/"] = (503, 1)
    assert refusal(folder, "hf://me/interrupted", on_hub).reason == "STORE_UNAVAILABLE"
    assert hub.repositories["me/interrupted"].files() == FIRST
    large = [path for path in hub.sent() if path.startswith("/blob/")]
    assert large
    (done,) = send(folder, "hf://me/interrupted", on_hub).destinations
    assert [path for path in hub.sent() if path.startswith("/blob/")] == large
    small = sum(size for size in map(len, files_below(folder).values()) if size < 1000)
    assert done.sent_bytes == small


def test_a_commit_of_somebody_else_meanwhile_is_not_undone(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    made = hub.make("me/busy")

    def commit_between(path: str) -> None:
        if "/commit/" in path and len(made.commits) == 1:
            made.commit("main", {**FIRST, "README.md": b"mine"}, "between")

    hub.before = commit_between
    error = refusal(folder, "hf://me/busy", on_hub)
    assert (error.reason, error.retryable) == ("STORE_UNAVAILABLE", True)
    assert "somebody else has committed meanwhile" in str(error)
    assert made.files()["README.md"] == b"mine"
    assert send(folder, "hf://me/busy", on_hub).destinations[0].sent_bytes < 5000


def test_it_can_be_stopped_within_a_large_file(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    stopped = threading.Event()

    def show(_url: str, _total: int) -> object:
        def count(size: int) -> None:
            if size > 1000:
                stopped.set()
            if stopped.is_set():
                raise StageError("interrupted", reason="CANCELLED")

        return count

    release = prepare_release(folder)
    outcomes = publish_each(release, ["hf://me/stopped"], access=on_hub, show=show)  # type: ignore[arg-type]
    error = outcomes["hf://me/stopped"]
    assert isinstance(error, StageError)
    assert error.reason == "CANCELLED"
    assert hub.repositories["me/stopped"].files() == FIRST


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("whoami", 401, "STORE_DENIED"),
        ("whoami", 500, "STORE_UNAVAILABLE"),
        ("whoami", 200, "STORE_INVALID"),
        ("/create", 403, "STORE_DENIED"),
        ("/tree/", 200, "STORE_INVALID"),
        ("/preupload/", 200, "STORE_INVALID"),
        ("/objects/batch", 403, "STORE_DENIED"),
        ("/blob/", 403, "STORE_DENIED"),
        ("/commit/", 413, "STORE_INVALID"),
        ("/commit/", 200, "STORE_INVALID"),
        ("/commit/", 429, "STORE_UNAVAILABLE"),
    ],
)
def test_what_the_hub_refuses_is_a_typed_error(
    hub: HubUploads, folder: Path, on_hub: Access, path: str, status: int, reason: str
) -> None:
    hub.answers[path] = (status, 100)
    error = refusal(folder, "hf://me/refused", on_hub)
    assert error.reason == reason, error
    assert TOKEN not in str(error)
    assert error.remedy


def test_who_may_not_write_is_told_before_the_work(hub: HubUploads, on_hub: Access) -> None:
    reach_destination("hf://me/new", on_hub)
    assert hub.repositories == {}
    assert hub.sent() == []
    for url, access, said in (
        ("hf://stranger/new", on_hub, "neither you nor an organization of yours"),
        ("hf://me/new", replace(on_hub, environment={}), "there is no token"),
        ("hf://me/new", replace(on_hub, environment={"HF_TOKEN": "hf_wrong"}), "it answers 401"),
    ):
        with pytest.raises(ModelExportError, match=said) as caught:
            reach_destination(url, access)
        assert caught.value.reason == "STORE_DENIED"
    hub.role = "read"
    with pytest.raises(ModelExportError, match="may only read"):
        reach_destination("hf://me/new", on_hub)


def test_what_the_hub_does_not_say_of_a_token_is_seen_later(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    """It answers 429 to frequent questions, and a token with rights of its own may write where its owner is not named."""
    hub.answers["whoami"] = (429, 1)
    reach_destination("hf://stranger/new", on_hub)
    hub.role = "fineGrained"
    hub.make("stranger/new")
    assert send(folder, "hf://stranger/new", on_hub).destinations[0].sent_bytes


def test_the_token_of_the_library_is_used(
    hub: HubUploads, on_hub: Access, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    reach_destination("hf://me/new", replace(on_hub, environment={}))


def test_a_hub_that_is_away_or_forbidden_is_said(on_hub: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    away = on_hub.settings.model_copy(update={"hub_endpoint": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(ModelExportError) as caught:
        reach_destination("hf://me/new", replace(on_hub, settings=away))
    assert caught.value.reason == "STORE_UNAVAILABLE"
    clear = on_hub.settings.model_copy(update={"hub_endpoint": "http://hub.example.com"})
    with pytest.raises(ConfigurationError, match="HF_ENDPOINT is not https"):
        reach_destination("hf://me/new", replace(on_hub, settings=clear))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelExportError) as offline:
        reach_destination("hf://me/new", on_hub)
    assert offline.value.reason == "STORE_INVALID"
    assert "HF_HUB_OFFLINE" in str(offline.value)


def test_it_is_verified_without_reading_large_files(
    hub: HubUploads, folder: Path, on_hub: Access, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    done = publish(folder, ["hf://me/proof"], access=on_hub, key=private).destinations[0]
    before = len(hub.seen)
    address, checked = check_hub("hf://me/proof", on_hub, trusted=TrustedKey(public))
    assert (address, checked.verdict, len(checked.signed_by)) == (done.address, "passed", 64)
    assert check_hub(done.address, on_hub)[1].signer is None
    read = {path.rpartition("/main/")[2].partition("/")[2] for _, path in hub.seen[before:] if "/resolve/" in path}
    assert not any(path.endswith(("model.onnx", "gguf")) for path in read)
    made = hub.repositories["me/proof"]
    good = made.files()
    made.commit("main", {**good, "onnx-int4/model.onnx": b"x" * 3000}, "other weights")
    with pytest.raises(ModelExportError, match=r"onnx-int4/model\.onnx") as caught:
        check_hub("hf://me/proof", on_hub)
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    assert check_hub(done.address, on_hub, trusted=TrustedKey(public))[1].signer, "the commit is as it was"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"onnx-int4/example.py": b"import os"}, "ARTIFACT_CORRUPT"),
        ({"onnx-int4/model.onnx": None}, "ARTIFACT_CORRUPT"),
        ({"pickle.bin": b"x"}, "ARTIFACT_CORRUPT"),
        ({"MANIFEST.sha256": None}, "ARTIFACT_INVALID"),
        ({"statement.intoto.json": b"{}"}, "STATEMENT_MISMATCH"),
        ({"model.sig": None}, "SIGNATURE_MISSING"),
        ({"model.sig": b"{}"}, "SIGNATURE_INVALID"),
    ],
)
def test_what_was_changed_on_the_hub_is_found(
    hub: HubUploads,
    folder: Path,
    on_hub: Access,
    keys: tuple[Path, Path],
    change: dict[str, bytes | None],
    reason: str,
) -> None:
    publish(folder, ["hf://me/changed"], access=on_hub, key=keys[0])
    made = hub.repositories["me/changed"]
    files = {**made.files(), **change}
    made.commit("main", {path: data for path, data in files.items() if data is not None}, "a change")
    with pytest.raises(ModelExportError) as caught:
        check_hub("hf://me/changed", on_hub, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == reason


@pytest.mark.slow
def test_what_is_not_on_the_hub_is_said(hub: HubUploads, folder: Path, on_hub: Access) -> None:
    send(folder, "hf://me/there", on_hub)
    for url in ("hf://me/nowhere", "hf://me/there@nowhere"):
        with pytest.raises(ModelExportError) as caught:
            check_hub(url, on_hub)
        assert caught.value.reason == "ARTIFACT_NOT_FOUND"
    with pytest.raises(ModelExportError):
        check_hub(f"hf://me/there@{'0' * 40}", on_hub)


def test_the_commands_publish_and_verify(
    hub: HubUploads, folder: Path, keys: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "SLIPWAY_SIGNING_KEY": str(keys[0])}
    done = in_process(capfd, "publish", folder, "hf://org/model?public", "--json", home=tmp_path / "home", **where)
    assert done.code == 0, done.err
    assert "Xet" not in done.err
    (one,) = done.json["destinations"]
    words = ("verify", one["address"], "--key", keys[1], "--json")
    verified = in_process(capfd, *words, home=tmp_path / "home", **where)
    assert (verified.code, verified.json["path"], verified.json["verdict"]) == (0, one["address"], "passed")
    wrong = in_process(capfd, "verify", "hf://org/..", "--json", home=tmp_path / "home", **where)
    assert (wrong.code, wrong.json["reason"]) == (3, "DESTINATION_INVALID")


@pytest.mark.parametrize(
    "url",
    [
        "hf://", "hf://qwen3", "hf://me/a/b", "hf://me/../x", "hf://me/a--b", "hf://me/a..b", "hf://me/.x", "hf://me/x.",
        "hf://me/x.git", "hf://me/x?private", "hf://me/x@", "hf://me/x@../y", "hf://me/x@refs/pr/1", "hf://me/x@a//b",
        "hf://me/x@y.lock", f"hf://me/x@{'0' * 40}", "hf://me/x@y z", "hf://me/ü", f"hf://me/{'x' * 97}", "hf://me/x\n",
        "hf://user:pass@me/x",
    ],
)  # fmt: skip
def test_what_is_no_repository_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(url)
    assert caught.value.reason == "DESTINATION_INVALID"
    assert "user:pass" not in str(caught.value)


def test_an_address_has_a_branch_and_says_whether_it_is_public() -> None:
    assert parse_address("hf://me/Qwen3-4B_q4.1") == ("me/Qwen3-4B_q4.1", "main", False)
    assert parse_address("hf://me/x@release/v1.0?public") == ("me/x", "release/v1.0", True)
    assert parse_address("hf://m/x?public") == ("m/x", "main", True)
