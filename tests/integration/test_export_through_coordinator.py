"""``slipway`` against a coordinator, from a machine that has neither the artifact store nor credentials of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.security.access.principals import new_token, token_hash
from slipway.settings.security import Security
from support.commands.cli import SLIPWAY, Done, slipway
from support.coordinators.harness import process, wait_for
from support.models import tiny_models
from support.servers.free_ports import free_port

pytestmark = [pytest.mark.slow]
PEOPLE = {
    "ci": "operator, projects: [red]",
    "other": "submitter, projects: [blue]",
    "admin": 'operator, projects: ["*"]',
}


@dataclass
class Site:
    """A coordinator and a worker over one home, and homes of clients elsewhere."""

    folder: Path
    port: int

    def run(self, who: str, *words: str | Path, home: Path | None = None, **environment: str) -> Done:
        project = "blue" if who == "other" else "red"
        where = ("--coordinator", f"127.0.0.1:{self.port}", "--project", project)
        token = ("--token-file", self.folder / f"{who}.token")
        return slipway(*words, *where, *token, home=home or self.folder / f"home-of-{who}", **environment)

    def client(self, who: str) -> Client:
        security = Security(token_file=self.folder / f"{who}.token")
        return Client(f"127.0.0.1:{self.port}", security=security, project="red")

    def answers(self) -> bool:
        with self.client("ci") as client:
            try:
                return list(client.list_artifacts()) == []
            except ModelExportError:
                return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), free_port())
    people = PEOPLE | {"worker": "worker"}
    entries = []
    for name, what in people.items():
        token = new_token()
        (site.folder / f"{name}.token").write_text(token)
        entries.append(f"  - {{name: {name}, role: {what}, token_sha256: {token_hash(token)}}}")
    (site.folder / "access.yaml").write_text("\n".join(["principals:", *entries]))
    address, home = f"127.0.0.1:{site.port}", {"SLIPWAY_HOME": str(site.folder / "server")}
    coordinator = ["coordinator", "--listen", address, "--state", str(site.folder / "state.db")]
    worker = ["worker", "--coordinator", address, "--stage", "merge", "--drain-seconds", "0"]
    coordinator += ["--access-file", str(site.folder / "access.yaml")]
    worker += ["--token-file", str(site.folder / "worker.token")]
    with ExitStack() as stack:
        stack.enter_context(process([SLIPWAY, *coordinator], site.folder / "coordinator.log", **home))
        stack.enter_context(process([SLIPWAY, *worker], site.folder / "worker.log", **home))
        wait_for(site.answers)
        yield site


def test_an_export_needs_no_store(site: Site, tmp_path: Path) -> None:
    tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run")
    only_merge = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")
    pushed = site.run("ci", "push", tmp_path / "base", "--json")
    assert pushed.code == 0, pushed.err
    base = pushed.json["digest"]
    words = ("export", "--json", "--base-model", base, "--checkpoint", tmp_path / "run", *only_merge)
    done = site.run("ci", *words, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert not (site.folder / "home-of-ci" / "store").exists()
    assert (
        done.json["base_match"]["status"] == "confirmed"
    )  # an artifact with the weights of the folder the adapter names
    labels = site.run("ci", "get", done.json["export_id"], "--json").json["labels"]
    assert labels["base_match"] == "confirmed"
    wrong = tiny_models.make_base(tmp_path / "elsewhere" / "base", seed=9)
    for command in ("export", "submit"):
        other = site.run("ci", command, "--json", "--base-model", wrong, "--checkpoint", tmp_path / "run", *only_merge)
        assert (other.code, other.json["reason"]) == (3, "BASE_MODEL_MISMATCH"), other.err
    merged = done.json["formats"]["pytorch"]["digest"]
    assert site.run("ci", "pull", merged, tmp_path / "pulled").code == 0

    refused = site.run("other", *words, "--out", tmp_path / "stolen")
    assert (refused.code, refused.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    refused = site.run("other", "pull", merged, tmp_path / "stolen", "--json")
    assert (refused.code, refused.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    assert not (tmp_path / "stolen").exists()

    collects = ("cache", "gc", "--older-than", "0s", "--json")
    server = site.folder / "server"
    assert site.run("admin", *collects, home=server).json["artifacts"] == []
    with site.client("ci") as client:
        client.delete_export(done.json["export_id"])
    assert merged in site.run("admin", *collects, home=server).json["artifacts"]
    assert base in LocalStore(server / "store").digests()  # what was pushed stays its project's
