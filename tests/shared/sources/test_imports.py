"""A worker imports sources only from allowed addresses, pinned, once, and completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore, files
from slipway.artifacts.opening import open_store
from slipway.artifacts.s3.client import S3Bucket
from slipway.configuration import parse
from slipway.errors import ConfigurationError, ModelExportError, StageError
from slipway.export_sources.import_stage import ImportParams, import_sources
from slipway.export_sources.naming import sources_to_import
from slipway.settings import Settings
from slipway.sources import mirror
from slipway.sources.hub_origin import HubOrigin
from slipway.stage import Context, Progress
from slipway_coordinator.lifecycle.importing import import_task
from support.models import tiny_models
from support.servers.hub_server import HubServer
from support.servers.s3_server import BUCKET, S3Server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read from the environment at import
    monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-the-worker")
    with HubServer() as running:
        yield running


@pytest.fixture
def repository(hub: HubServer, tmp_path: Path) -> str:
    """Make a repository with large and small files, and some that are not imported; return its commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("code")
    return hub.push("org/tiny", folder)


def download(origin: HubOrigin, name: str, target: Path) -> str:
    file = next(file for file in origin.listing(most=10) if file.key == name)
    with ThreadPoolExecutor(1) as pool:
        return origin.download(file, target, pool=pool, on_bytes=lambda _: None)


def test_a_repository_is_read_at_the_commit_that_its_branch_had(
    hub: HubServer, repository: str, tmp_path: Path
) -> None:
    hub.token = "hf_a-token-of-the-worker"
    origin = HubOrigin("hf://org/tiny", endpoint=hub.endpoint)
    assert origin.pinned == f"hf://org/tiny@{repository}"
    assert [file.key for file in origin.listing(most=10)] == ["config.json", "model.safetensors"]
    later = tmp_path / "later"
    shutil.copytree(tmp_path / "repository", later)
    (later / "model.safetensors").write_bytes(b"other")
    assert hub.push("org/tiny", later) != repository
    digest = download(origin, "model.safetensors", tmp_path / "x")
    expected = (tmp_path / "repository" / "model.safetensors").read_bytes()
    assert (tmp_path / "x").read_bytes() == expected
    assert digest == f"sha256:{hashlib.sha256(expected).hexdigest()}"
    large = next(file for file in origin.listing(most=10) if file.digest)
    assert (origin.read(large, 7, 20), origin.read(large, 299_990, 50)) == (expected[7:27], expected[299_990:])
    assert (large.digest, HubOrigin(origin.pinned, endpoint=hub.endpoint).commit) == (digest, repository)


@pytest.mark.usefixtures("repository")
def test_a_download_goes_on_where_it_broke_off(hub: HubServer, tmp_path: Path) -> None:
    origin = HubOrigin("hf://org/tiny@main", endpoint=hub.endpoint)
    hub.cut = 100_000
    download(origin, "model.safetensors", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "repository" / "model.safetensors").read_bytes()
    assert [span for path, span in hub.seen if "/resolve/" in path] == ["", "bytes=100000-299999", "bytes=200000-299999"]  # fmt: skip


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("change", "reason", "retryable"),
    [
        ({"status": 403}, "BASE_MODEL_NOT_FOUND", False),
        ({"token": "another"}, "BASE_MODEL_NOT_FOUND", False),
        ({"flip": True}, "ARTIFACT_CORRUPT", True),
    ],
)
def test_what_the_hub_refuses_or_spoils(
    hub: HubServer, tmp_path: Path, change: dict[str, Any], reason: str, retryable: bool
) -> None:
    origin = HubOrigin("hf://org/tiny", endpoint=hub.endpoint)
    for name, value in change.items():
        setattr(hub, name, value)
    with pytest.raises(ModelExportError) as raised:
        download(origin, "model.safetensors", tmp_path / "x")
    assert (raised.value.reason, raised.value.retryable) == (reason, retryable)
    assert "hf_a-token" not in str(raised.value)


@pytest.mark.usefixtures("hub")
def test_a_hub_that_is_away_is_worth_another_try() -> None:
    with pytest.raises(ModelExportError) as raised:
        HubOrigin("hf://org/tiny", endpoint="http://127.0.0.1:9")
    assert (raised.value.reason, raised.value.retryable) == ("STORE_UNAVAILABLE", True)


@pytest.mark.parametrize("name", ["nobody/nothing", "org/tiny@v9"])
@pytest.mark.usefixtures("repository")
def test_what_the_hub_does_not_have_is_said(hub: HubServer, name: str) -> None:
    with pytest.raises(ModelExportError) as raised:
        HubOrigin(f"hf://{name}", endpoint=hub.endpoint)
    assert raised.value.reason == "BASE_MODEL_NOT_FOUND"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make ``base`` and ``run/checkpoint-10``, which says that it was trained on ``org/tiny``."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_base(folder / "base")
    checkpoint = tiny_models.make_checkpoint(folder / "base", folder / "run")
    config = checkpoint / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{folder / "base"}"', '"org/tiny"'))
    assert "org/tiny" in config.read_text()
    return folder


class Place:
    """A store and the sources before it: a run in a bucket, a base on the hub."""

    def __init__(self, s3: S3Server, hub: HubServer, models: Path, home: Path) -> None:
        self.hub, self.models = hub, models
        self.bucket = S3Bucket(s3.options(), BUCKET, prefix=f"{uuid.uuid4().hex}/run-17")
        for path in sorted((models / "run").rglob("*")):
            if path.is_file():
                self.bucket.put(path.relative_to(models / "run").as_posix(), path.read_bytes())
        self.commit = hub.push("org/tiny", models / "base")
        environment = {**s3.environment(), "SLIPWAY_HOME": str(home), "HF_ENDPOINT": hub.endpoint}
        environment["SLIPWAY_IMPORT_FROM"] = f"{self.bucket.url} hf://org"
        self.settings = Settings.from_environment(environment)
        self.store = open_store(self.settings)
        self.progress: list[Progress] = []
        self.on_progress: Callable[[Progress], None] = self.progress.append

    def bring(
        self, given: dict[str, str] | None = None, *, params: dict[str, Any] | None = None, **configuration: Any
    ) -> dict[str, Any]:
        """Import the sources that a configuration names and that were not uploaded; return the facts."""
        configured = parse({"checkpoint": {"path": self.bucket.url}, **configuration})
        brought = given or {}
        task = import_task(configured, brought, sources_to_import(configured, brought))
        scratch = self.settings.scratch / uuid.uuid4().hex
        scratch.mkdir(parents=True)
        ctx = Context(workdir=scratch, on_progress=self.on_progress)
        try:
            import_sources(
                ImportParams.model_validate(
                    {**task.params, **(params or {}), "brought": sorted(brought.values()), "project": "red"}
                ),
                self.settings,
                self.store,
                ctx,
            )
        finally:
            left = list(scratch.iterdir())
            shutil.rmtree(scratch)
            assert left == []
        return ctx.facts


@pytest.fixture(params=["a folder", "a bucket"])
def place(request: pytest.FixtureRequest, s3: S3Server, hub: HubServer, models: Path, tmp_path: Path) -> Place:
    place = Place(s3, hub, models, tmp_path / "home")
    if request.param == "a bucket":
        place.settings = place.settings.model_copy(update={"store": f"s3://{BUCKET}/{uuid.uuid4().hex}"})
        place.store = open_store(place.settings)
    return place


def files_of(place: Place, digest: str, target: Path) -> dict[str, bytes]:
    place.store.fetch(digest, target)
    return {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def test_base_and_adapter_are_imported_pinned_and_looked_at_together(place: Place, tmp_path: Path) -> None:
    facts = place.bring(base_model={"name": "hf://org/tiny"})
    assert facts["urls"] == {
        "adapter": f"{place.bucket.url}/checkpoint-10",
        "base": f"hf://org/tiny@{place.commit}",
    }
    base = files_of(place, facts["digests"]["base"], tmp_path / "base")
    assert base["model.safetensors"] == (place.models / "base" / "model.safetensors").read_bytes()
    adapter = files_of(place, facts["digests"]["adapter"], tmp_path / "adapter")
    assert "optimizer.pt" not in adapter
    assert (
        adapter["adapter_model.safetensors"]
        == (place.models / "run/checkpoint-10/adapter_model.safetensors").read_bytes()
    )
    labels = facts["labels"]
    assert (labels["model_name"], labels["checkpoint"], labels["base_model"]) == ("run-17", "checkpoint-10", "org/tiny")
    assert labels["base_match"] == "confirmed", labels
    phases = {progress.phase for progress in place.progress}
    assert {"looking at sources", "importing adapter", "importing base"} <= phases
    last = [progress for progress in place.progress if progress.phase == "importing base"][-1]
    assert last.done == last.total == sum(map(len, base.values()))


def test_the_base_that_the_adapter_names_is_one_of_the_hub(place: Place) -> None:
    assert place.bring()["urls"]["base"] == f"hf://org/tiny@{place.commit}"


def test_what_is_there_is_not_read_again(
    place: Place, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_REMEMBERED_BYTES", 50_000)
    first = place.bring(base_model={"name": "hf://org/tiny"})
    assert first["read_bytes"] == first["imported_bytes"]
    place.hub.seen.clear()
    again = place.bring(base_model={"name": "hf://org/tiny@main"})
    assert (again["digests"], again["read_bytes"]) == (first["digests"], 0)
    assert not {"model.safetensors", "tokenizer.json"} & set(place.hub.downloads()), "only what describes it is"
    copy = tmp_path / "copy"
    shutil.copytree(models / "base", copy)
    (copy / "generation_config.json").write_text("{}")
    place.hub.push("org/tiny", copy)
    third = place.bring(base_model={"name": "hf://org/tiny"})
    assert third["digests"]["base"] != first["digests"]["base"]
    assert third["read_bytes"] < 20_000, "the weights are known by the digest that the hub tells"


def test_a_digest_that_a_repository_tells_opens_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository claims the digest of another project's large file without having the file."""
    monkeypatch.setattr(mirror, "_REMEMBERED_BYTES", 1000)
    secret = tmp_path / "secret"
    secret.write_bytes((place.models / "base" / "model.safetensors").read_bytes())
    place.store.put_files({"of-another-project": secret})
    place.hub.flip = True  # the content is another
    with pytest.raises(ModelExportError) as raised:
        place.bring(base_model={"name": "hf://org/tiny"})
    assert raised.value.reason == "ARTIFACT_CORRUPT"


def test_an_interrupted_import_goes_on_after_the_files_it_has(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket names no digests, so the digest of each large file is remembered."""
    monkeypatch.setattr(mirror, "_REMEMBERED_BYTES", 10_000)
    monkeypatch.setattr(files, "WORKERS", 1)  # in the order of their names
    sizes = {}
    for path in sorted((place.models / "base").iterdir()):
        sizes[path.name] = len(path.read_bytes())
        place.bucket.put(f"base/{path.name}", path.read_bytes())
    base = {"name": f"{place.bucket.url}/base"}

    def stop(progress: Progress) -> None:
        if (
            progress.phase == "importing base"
            and progress.done > sizes["config.json"] + sizes["model.safetensors"] + 200
        ):
            raise StageError("stopped", reason="CANCELLED")

    place.on_progress = stop
    with pytest.raises(StageError):
        place.bring(base_model=base)
    place.on_progress = place.progress.append
    facts = place.bring(base_model=base)
    assert facts["read_bytes"] < facts["imported_bytes"] - sizes["model.safetensors"]
    assert place.bring(base_model=base)["read_bytes"] == 0


def test_a_brought_adapter_is_looked_at_without_being_fetched(place: Place, models: Path) -> None:
    checkpoint = models / "run" / "checkpoint-10"
    digest = place.store.put_files({p.name: p for p in checkpoint.iterdir() if p.name != "optimizer.pt"})
    facts = place.bring({"adapter": digest}, base_model={"name": "hf://org/tiny"})
    assert list(facts["digests"]) == ["base"]
    assert facts["labels"]["base_match"] == "confirmed"


def test_a_wrong_base_is_refused_before_its_weights_are_read(place: Place, tmp_path: Path) -> None:
    place.hub.push("org/other", tiny_models.make_base(tmp_path / "other", hidden=32))
    with pytest.raises(ModelExportError) as raised:
        place.bring(base_model={"name": "hf://org/other"})
    assert raised.value.reason == "ADAPTER_BASE_MISMATCH"
    assert "hf://org/other" in raised.value.message
    assert "model.safetensors" not in place.hub.downloads()


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({"base_model": {"name": "hf://Qwen/tiny"}}, "SOURCE_NOT_ALLOWED"),
        ({"base_model": {"name": "hf://org/tiny"}, "checkpoint": {"path": "s3://secrets/x"}}, "SOURCE_NOT_ALLOWED"),
        ({"base_model": {"name": "/etc"}}, "SOURCE_NOT_ALLOWED"),
        ({"base_model": {"name": "sha256:" + "1" * 64}}, "SOURCE_NOT_ALLOWED"),
    ],
)
def test_a_worker_reads_what_its_own_list_has_and_nothing_else(
    s3: S3Server, hub: HubServer, models: Path, tmp_path: Path, configuration: dict[str, Any], reason: str
) -> None:
    """The worker checks its own list, even if the coordinator allowed the address."""
    with pytest.raises(ModelExportError) as raised:
        Place(s3, hub, models, tmp_path / "home").bring(**configuration)
    assert raised.value.reason == reason


def test_an_adapter_cannot_lead_to_files_of_the_worker(
    s3: S3Server, hub: HubServer, models: Path, tmp_path: Path
) -> None:
    place = Place(s3, hub, models, tmp_path / "home")
    config = place.bucket.get("checkpoint-10/adapter_config.json").decode()
    for named in (str(models / "base"), "../base", "~/base"):
        place.bucket.put("checkpoint-10/adapter_config.json", config.replace("org/tiny", named).encode())
        with pytest.raises(ConfigurationError, match="a folder of the machine it was trained on"):
            place.bring()


def test_an_import_that_is_too_large_is_refused_before_it_is_read(
    s3: S3Server, hub: HubServer, models: Path, tmp_path: Path
) -> None:
    place = Place(s3, hub, models, tmp_path / "home")
    place.settings = place.settings.model_copy(update={"import_bytes": 100_000})
    with pytest.raises(ModelExportError) as raised:
        place.bring(base_model={"name": "hf://org/tiny"})
    assert raised.value.reason == "LIMIT_EXCEEDED"
    assert LocalStore(place.settings.store_path).digests() == []


def test_a_bucket_of_too_many_files_is_refused(
    s3: S3Server, hub: HubServer, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MOST_FILES", 3)
    with pytest.raises(ModelExportError, match="4 files lie below") as raised:
        Place(s3, hub, models, tmp_path / "home").bring()
    assert raised.value.reason == "LIMIT_EXCEEDED"


def test_made_again_it_is_what_it_was(s3: S3Server, hub: HubServer, models: Path, tmp_path: Path) -> None:
    place = Place(s3, hub, models, tmp_path / "home")
    first = place.bring(base_model={"name": "hf://org/tiny"})
    pinned = {n: {"url": first["urls"][n], "digest": first["digests"][n]} for n in first["digests"]}
    newer = tmp_path / "newer"
    shutil.copytree(models / "base", newer)
    (newer / "generation_config.json").write_text("{}")
    hub.push("org/tiny", newer)
    for path in sorted((models / "run" / "checkpoint-10").iterdir()):
        place.bucket.put(
            f"checkpoint-20/{path.name}", path.read_bytes().replace(b'"global_step": 10', b'"global_step": 20')
        )
    shutil.rmtree(tmp_path / "home" / "store")
    place.store = open_store(place.settings)
    again = place.bring(params={"pinned": pinned}, base_model={"name": "hf://org/tiny"})
    assert again["digests"] == first["digests"]
    assert place.bring(base_model={"name": "hf://org/tiny"})["urls"]["adapter"].endswith("/checkpoint-20")
