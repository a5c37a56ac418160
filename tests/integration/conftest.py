"""Servers for tests of hostile clients, projects of users who export, and models that are trained once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands.project import Project
from support.coordinators.guarded_servers import CONTENT, PUSHED, SOURCES, Servers
from support.coordinators.harness import CONFIGURATION, wait_for
from support.harness.made_once import made_once
from support.models import tiny_models


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("bad-clients"), stack)
        wait_for(servers.healthy)
        with servers.client("submitter") as client:
            (servers.home / "text.txt").write_bytes(CONTENT)
            assert client.push_artifact({"text.txt": servers.home / "text.txt"}) == PUSHED
            client.create_export(CONFIGURATION, sources=SOURCES, export_id="ours")
        yield servers
        assert servers.healthy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture
def project(models: Path, tmp_path: Path) -> Project:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    project = Project(tmp_path)
    config = project.checkpoint / "adapter_config.json"
    # The copy names its own base, so that a damaged one is not compared with the whole one.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(project.base)}))
    return project


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier of texts with its adapter and its texts; tests only read it."""
    from support.models.trained_classifier import make_classifier, tune_classifier

    with made_once(tmp_path_factory, "classifier") as folder:
        if not (folder / "relabelled.jsonl").exists():
            make_classifier(folder)
            tune_classifier(folder)
    return folder


@pytest.fixture(scope="session")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained translator with its adapter and its sentences; tests only read it."""
    from support.models.trained_translator import make_translator, tune_translator

    with made_once(tmp_path_factory, "translator") as folder:
        if not (folder / "tuned.jsonl").exists():
            make_translator(folder)
            tune_translator(folder)
    return folder
