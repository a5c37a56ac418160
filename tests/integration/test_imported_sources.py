"""An export whose sources are only named: the client has neither their content nor credentials, workers import them."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from support.commands.cli import SLIPWAY, Done, slipway
from support.coordinators.harness import process, state, states, wait_for, watch
from support.models import tiny_models
from support.models.saved_adapters import edit
from support.servers.free_ports import free_port
from support.servers.hub_server import HubServer
from support.servers.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.slow]
ONLY_MERGE = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")


@dataclass
class Site:
    """A coordinator and a worker that may import; runs in a bucket, bases on a hub."""

    folder: Path
    port: int
    hub: HubServer
    prefix: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}/default/run-17"

    def run(self, *words: str | Path, home: Path) -> Done:
        """A client that has no credentials of any store, nor a way to one."""
        nowhere = {"AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "HF_ENDPOINT": "http://127.0.0.1:9"}
        return slipway(*words, "--coordinator", f"127.0.0.1:{self.port}", "--json", home=home, **nowhere)

    def answers(self) -> bool:
        with Client(f"127.0.0.1:{self.port}") as client:
            try:
                return list(client.list_exports()) == []
            except ModelExportError:
                return False


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two runs, the second with a kind of adapter that servers do not take."""
    models = tmp_path_factory.mktemp("models")
    tiny_models.make_base(models / "base")
    config = tiny_models.make_checkpoint(models / "base", models / "run") / "adapter_config.json"
    config.write_text(config.read_text().replace(str(models / "base"), "org/tiny"))
    shutil.copytree(models / "run", models / "run-dora")
    edit(models / "run-dora" / config.parent.name, use_dora=True)
    return models


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, s3: S3Server, models: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        hub = stack.enter_context(HubServer(token="hf_of-the-workers"))
        hub.push("org/tiny", models / "base")
        site = Site(folder, free_port(), hub, uuid.uuid4().hex)
        for run, where in (("run", "run-17"), ("run", "served"), ("run-dora", "served-dora")):
            for path in sorted((models / run / "checkpoint-10").iterdir()):
                name = f"{site.prefix}/default/{where}/checkpoint-10/{path.name}"
                s3.client().fput_object(BUCKET, name, str(path))
        server = {
            **s3.environment(),
            "SLIPWAY_HOME": str(folder / "server"),
            "SLIPWAY_STORE": f"s3://{BUCKET}/{site.prefix}-store",
            "SLIPWAY_IMPORT_FROM": f"s3://{BUCKET}/{site.prefix}/{{project}} hf://org",
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_of-the-workers",
        }
        site.environment |= server
        address = f"127.0.0.1:{site.port}"
        coordinator = ["coordinator", "--listen", address, "--state", str(folder / "state.db")]
        worker = ["worker", "--coordinator", address, "--stage", "import,merge,adapter", "--drain-seconds", "0"]
        for name, words in (("coordinator", coordinator), ("worker", worker)):
            stack.enter_context(process([SLIPWAY, *words], folder / f"{name}.log", **server))
        wait_for(site.answers)
        yield site


ONLY_ADAPTER = ("--set", "formats.adapter.enabled=true", "--set", "formats.pytorch.enabled=false", *ONLY_MERGE)


def test_an_adapter_is_delivered_without_its_sources_being_here(site: Site, models: Path, tmp_path: Path) -> None:
    """It is the one that an export of the folders delivers; one that servers do not take is refused by the worker, by name."""
    runs = f"s3://{BUCKET}/{site.prefix}/default"
    named = ("export", "--base-model", "hf://org/tiny", "--out", tmp_path / "out", *ONLY_ADAPTER)
    done = site.run(*named, "--checkpoint", f"{runs}/served", home=tmp_path / "client")
    assert done.code == 0, done.err + (site.folder / "worker.log").read_text()[-3000:]
    assert [attempt["stage"] for attempt in done.json["attempts"]] == ["import", "adapter"]
    config = json.loads((Path(done.json["paths"]["adapter"]) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    folders = ("--checkpoint", models / "run", "--base-model", models / "base", "--out", tmp_path / "alone", "--json")
    alone = slipway("export", *folders, *ONLY_ADAPTER, home=tmp_path / "home")
    assert alone.code == 0, alone.err
    assert done.json["formats"]["adapter"]["digest"] == alone.json["formats"]["adapter"]["digest"]

    refused = site.run(*named, "--checkpoint", f"{runs}/served-dora", home=tmp_path / "client")
    assert (refused.code, refused.json["reason"]) == (6, "ADAPTER_NOT_SERVABLE"), refused.err
    assert "use_dora" in refused.json["error_message"]
    assert "formats.adapter.enabled=false" in refused.json["error_message"]


def test_a_pipeline_names_addresses_and_gets_models(site: Site, tmp_path: Path) -> None:
    home = tmp_path / "client"
    out = ("--set", f"output.directory={tmp_path / 'out'}")
    named = ("--checkpoint", site.checkpoint, "--base-model", "hf://org/tiny", *ONLY_MERGE, *out)
    submitted = site.run("submit", "--request-id", "run-of-a-pipeline", *named, home=home)
    assert submitted.code == 0, submitted.err
    again = site.run("submit", "--request-id", "run-of-a-pipeline", *named, home=home)
    assert again.json["name"] == submitted.json["name"], "the step of a pipeline may be repeated"
    done = site.run("watch", submitted.json["name"], home=home)
    assert done.code == 0, (site.folder / "worker.log").read_text()[-3000:]
    assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < 100_000, "nothing passed through it"
    tasks = {task["id"]: task for task in done.json["tasks"]}
    assert list(tasks) == ["import", "merge"]
    assert tasks["merge"]["inputs"] == {"adapter": "task:import/adapter", "base": "task:import/base"}
    assert done.json["sources"] == tasks["import"]["outputs"]
    labels = done.json["labels"]
    assert (labels["model_name"], labels["base_model"], labels["base_match"]) == ("run-17", "org/tiny", "confirmed")
    listed = site.run("list", "--filter", 'label.model_name = "run-17"', home=home)
    assert [export["name"] for export in listed.json["exports"]] == [submitted.json["name"]]
    fetched = site.run("export", "--request-id", "run-of-a-pipeline", *named, home=home)
    assert fetched.code == 0, fetched.err
    (lineage,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("run-17_*/lineage.json"))
    commit = site.hub.branches["org/tiny", "main"]
    assert lineage["imported_from"] == {
        "adapter": f"{site.checkpoint}/checkpoint-10",
        "base": f"hf://org/tiny@{commit}",
    }
    assert lineage["sources"] == done.json["sources"]
    secrets = "hf_of-the-workers"
    assert secrets not in json.dumps([done.json, lineage])
    second = site.run("export", *named, home=home)
    assert second.code == 0, second.err
    assert second.json["export_id"] != fetched.json["export_id"], "what an address holds may have changed"
    assert [attempt["reused"] for attempt in second.json["attempts"]] == [True, True], "nothing is imported twice"


def test_two_exports_at_the_same_moment_import_a_base_once(site: Site, s3: S3Server, tmp_path: Path) -> None:
    """Two workers are free, and each could take one of the imports."""
    base = tiny_models.make_base(tmp_path / "base", seed=7)
    checkpoints = []
    for number in range(2):
        folder = tiny_models.make_checkpoint(base, tmp_path / f"run-{number}", seed=number)
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace(str(base), "org/both"))
        for path in sorted(folder.iterdir()):
            s3.client().fput_object(BUCKET, f"{site.prefix}/default/both-{number}/checkpoint-10/{path.name}", str(path))
        checkpoints.append(f"s3://{BUCKET}/{site.prefix}/default/both-{number}")
    site.hub.push("org/both", base)
    words = [
        "worker",
        "--coordinator",
        f"127.0.0.1:{site.port}",
        "--stage",
        "import,merge,adapter",
        "--drain-seconds",
        "0",
    ]
    environment = site.environment | {"SLIPWAY_HOME": str(tmp_path / "second")}
    second = tmp_path / "second.log"
    named = ("--base-model", "hf://org/both", *ONLY_MERGE)

    def submit(checkpoint: str) -> str:
        done = site.run("submit", "--checkpoint", checkpoint, *named, home=tmp_path / "home")
        assert done.code == 0, done.err
        return str(done.json["name"])

    with process([SLIPWAY, *words], second, **environment), Client(f"127.0.0.1:{site.port}") as client:
        wait_for(lambda: "runs import" in second.read_text())
        site.hub.seen.clear()
        site.hub.flows.clear()
        with ThreadPoolExecutor(2) as pool:
            names = list(pool.map(submit, checkpoints))
        wait_for(site.hub.downloads)
        time.sleep(2)  # in which the other worker would take the other import
        assert sorted(states(client.get_export(name))["import"] for name in names) == ["queued", "running"]
        site.hub.flows.set()
        for name in names:
            assert state(list(watch(client, name))[-1]) == "succeeded"
    assert site.hub.downloads().count("model.safetensors") == 1


def test_an_adapter_of_this_machine_goes_with_a_base_that_is_named(site: Site, tmp_path: Path) -> None:
    base = tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(base, tmp_path / "mine")
    site.hub.push("org/mine", base)
    words = ("--checkpoint", tmp_path / "mine", "--base-model", "hf://org/mine", *ONLY_MERGE)
    done = site.run("export", *words, "--out", tmp_path / "out", home=tmp_path / "home")
    assert done.code == 0, done.err
    assert done.json["base_match"]["status"] == "unproven", "its files say where the base was, not what"


@pytest.mark.parametrize(
    ("checkpoint", "base", "reason"),
    [
        ("{bucket}/{prefix}/other-project/run", "hf://org/tiny", "SOURCE_NOT_ALLOWED"),
        ("{bucket}/{prefix}/default/nothing", "hf://org/tiny", "SOURCE_NOT_FOUND"),
        ("{bucket}/{prefix}/default/run-17", "hf://org/nothing", "BASE_MODEL_NOT_FOUND"),
    ],
)
def test_what_may_not_or_cannot_be_imported_is_said(
    site: Site, tmp_path: Path, checkpoint: str, base: str, reason: str
) -> None:
    where = checkpoint.format(bucket=f"s3://{BUCKET}", prefix=site.prefix)
    words = ("export", "--checkpoint", where, "--base-model", base, *ONLY_MERGE, "--out", tmp_path / "out")
    done = site.run(*words, home=tmp_path / "home")
    assert (done.code, done.json["reason"]) == (3, reason), done.err
    assert not (tmp_path / "out").exists()
    assert not list((site.folder / "server" / "scratch").glob(".import*"))
