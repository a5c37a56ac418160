"""``pip install slipway-ml`` alone: the client and the command against a coordinator; the rest says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.client import Client
from slipway.distribution import DISTRIBUTION, EXTRA_MODULES
from support.commands.cli import SLIPWAY
from support.commands.light_install import (
    PROJECT,
    LightInstall,
    freshly_installed,
    hidden_modules,
    light_distributions,
    modules_of,
    normal,
    with_extras_hidden,
)
from support.coordinators.harness import Harness, process, tiny_export, tiny_task, wait_for
from support.models import tiny_models
from support.servers.free_ports import free_port

COMMANDS = (
    *("export", "submit", "get", "list", "watch", "cancel", "retry", "delete"),
    *("doctor", "checkpoints", "stage", "stage merge", "sample", "verify", "publish", "push", "pull", "cache", "cache ls", "cache gc"),
    *("coordinator", "worker", "token"),
)  # fmt: skip


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> LightInstall:
    return with_extras_hidden(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> LightInstall:
    return freshly_installed(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("h")) as harness:
        yield harness


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A base and a checkpoint of one tensor each."""
    base, adapter = tmp_path / "base", tmp_path / "run" / "checkpoint-5"
    base.mkdir()
    adapter.mkdir(parents=True)
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.embed_tokens.weight": np.zeros((8, 16), np.float32)}, base / "model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora": np.zeros((4, 16), np.float32)}, adapter / "adapter_model.safetensors")
    return tmp_path


def test_what_is_hidden_is_what_extras_bring() -> None:
    hidden = set(hidden_modules())
    assert {
        "dbos",
        "psycopg",
        "sqlalchemy",
        "jinja2",
        "prometheus_client",
        "psutil",
        "minio",
        "torch",
        "numpy",
    } <= hidden
    assert not hidden & {"grpc", "google", "pydantic", "yaml", "rich", "typer"}
    assert not light_distributions() & {"dbos", "psycopg", "sqlalchemy", "jinja2", "numpy", "torch"}


@pytest.mark.parametrize("extra", sorted(EXTRA_MODULES))
def test_the_modules_of_an_extra_are_those_of_its_distributions(extra: str) -> None:
    lines: list[str] = PROJECT["optional-dependencies"][extra]
    own = {module for line in lines if not line.startswith("slipway") for module in modules_of(line)}
    if extra == "ray" and not own:
        pytest.skip("ray is not installed: pip install 'slipway-ml[ray]'")
    named = {module.partition(".")[0] for module in EXTRA_MODULES[extra]}
    inherited = {
        module.partition(".")[0]
        for other in ("telemetry", "worker")
        if other != extra
        for module in EXTRA_MODULES[other]
    }
    assert named - inherited <= own | {"opentelemetry"}
    for line in lines:
        if not line.startswith("slipway"):
            assert named & set(modules_of(line)), f"{line} is not looked for"


def test_all_holds_every_extra_but_those_for_gpus_and_development_and_what_pins_others() -> None:
    (line,) = PROJECT["optional-dependencies"]["all"]
    held = set(line.removeprefix(f"{DISTRIBUTION}[").removesuffix("]").split(","))
    extras = set(PROJECT["optional-dependencies"])
    assert extras - held == {
        "all",
        "coreml",
        "dev",
        "docs",
        "executorch",
        "kubernetes",
        "litert",
        "mlflow",
        "oidc",
        "onnxruntime-gpu",
        "publish",
        "ray",
        "release",
        "telemetry",
        "tensorrt",
    }  # oidc and telemetry come with the worker
    assert {normal(name) for name in held} == {normal(name) for name in held & extras}


def test_help_takes_little_processor_time(light: LightInstall) -> None:
    python = replace(light, program=sys.executable)
    library = min(python.cpu_seconds("-Ic", "import argparse, asyncio, json") for _ in range(3))
    assert min(light.cpu_seconds("--help") for _ in range(3)) < 8 * library, (
        "and not the seconds of what exports import"
    )


@pytest.mark.slow
def test_every_command_explains_itself(light: LightInstall) -> None:
    assert_every_command_explains_itself(light)


def assert_every_command_explains_itself(light: LightInstall) -> None:
    assert light.run("--version").out.startswith("slipway")
    failed = {command: done.err for command in COMMANDS if (done := light.run(*command.split(), "--help")).code}
    assert failed == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("export", "--checkpoint", "x"), "'slipway-ml[all]', or name a coordinator: --coordinator HOST:PORT"),
        (("coordinator", "--state", "x.db"), "'slipway-ml[coordinator]'"),
        (("worker", "--coordinator", "localhost:1"), "'slipway-ml[worker]'"),
        (("stage", "merge", "--out", "x"), "'slipway-ml[merge]'"),
        (("sample", "x"), "'slipway-ml[sample]'"),
        (("list",), "'slipway-ml[coordinator]', or name one: --coordinator HOST:PORT"),
        (("get", "e-1"), "'slipway-ml[coordinator]', or name one: --coordinator HOST:PORT"),
        (("checkpoints", "s3://bucket/run"), "'slipway-ml[s3]'"),
        (("publish", "run", "oci://registry/name"), "'slipway-ml[publish]'"),
        (("publish", "run", "s3://bucket/run"), "'slipway-ml[s3]'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_that_needs_more_says_what_to_install(light: LightInstall, words: tuple[str, ...], says: str) -> None:
    done = light.run(*words)
    assert done.code == 6
    assert "error [UNSUPPORTED] " in done.err
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err
    if words[0] not in ("coordinator", "worker"):
        told = light.run(*words, "--json").json
        assert (told["reason"], f"pip install {says}") == ("UNSUPPORTED", told["remedy"])


def test_a_cache_is_looked_after_unless_exports_ran_here(light: LightInstall, tmp_path: Path) -> None:
    light = replace(light, home=tmp_path / "home")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("mine")
    digest = light.run("push", tmp_path / "folder", "--json").json["digest"]
    assert [each["digest"] for each in light.run("cache", "ls", "--json").json["artifacts"]] == [digest]
    (light.home / "exports" / "e-1").mkdir(parents=True)
    for words in (("cache", "ls"), ("cache", "gc", "--older-than", "0s")):
        done = light.run(*words)
        assert (done.code, "'slipway-ml[coordinator]'" in done.err) == (6, True), done.err
    (light.home / "exports" / "e-1").rmdir()
    assert light.run("cache", "gc", "--older-than", "0s", "--json").json["artifacts"] == [digest]


def test_doctor_says_what_each_stage_lacks(light: LightInstall) -> None:
    told = light.run("doctor", "--json").json
    stages = {stage["name"]: stage for stage in told["stages"]}
    extras = {
        name: name for name in ("adapter", "coreml", "executorch", "gguf", "litert", "merge", "openvino", "torchscript")
    }
    for name, extra in {**extras, "torch_export": "torchscript", "importance": "quantize"}.items():
        assert stages[name]["available"] is False
        wanted = f"all,{extra}" if extra in {"executorch", "litert"} else extra
        assert f"pip install 'slipway-ml[{wanted}]'" in stages[name]["missing"]
        said = [each["detail"] for each in stages[name]["providers"] if not each["available"]]
        assert said == [stages[name]["missing"], *["the same"] * (len(said) - 1)]
    formats = {each["name"]: each for each in told["formats"]}
    for name in (
        "adapter",
        "coreml",
        "coreml-<level>",
        "executorch",
        "executorch-<level>",
        "gguf",
        "litert",
        "litert-<level>",
        "openvino-<level>",
        "torch_export",
        "torchscript",
    ):
        assert formats[name]["available"] is False
        assert f"{extras.get(name.partition('-')[0], 'torchscript')}]'" in formats[name]["detail"]
    assert told["machine"]["memory_bytes"] > 1 << 30


@pytest.mark.slow
def test_exports_of_a_coordinator(light: LightInstall, harness: Harness, run_folder: Path) -> None:
    where = ("--coordinator", harness.address)
    ended = harness.submit(tiny_export("ended", tiny_task("onnx"), base=harness.base()))
    watched = light.run("watch", ended, *where, "--progress", "json")
    assert watched.code == 0, watched.err
    assert '"event": "task"' in watched.err

    words = ("submit", "--checkpoint", run_folder / "run", "--base-model", run_folder / "base")
    submitted = light.run(*words, *where, "--json")
    assert submitted.code == 0, submitted.err
    name = submitted.json["name"]
    assert light.run("get", name, *where, "--json").json["name"] == name
    listed = light.run("list", *where, "--json").json["exports"]
    assert {export["name"] for export in listed} == {name, ended}
    assert light.run("cancel", name, *where, "--json").code == 0
    wait_for(lambda: light.run("get", name, *where, "--json").json["state"] == "EXPORT_STATE_CANCELLED")
    assert light.run("retry", name, *where, "--json").json["state"] in ("EXPORT_STATE_QUEUED", "EXPORT_STATE_RUNNING")
    assert light.run("cancel", name, *where).code == 0
    wait_for(lambda: light.run("get", name, *where, "--json").json["state"] == "EXPORT_STATE_CANCELLED")
    for export in (name, ended):
        assert light.run("delete", export, *where).code == 0
    assert light.run("list", *where, "--json").json["exports"] == []


def test_artifacts_through_a_coordinator(light: LightInstall, harness: Harness, tmp_path: Path) -> None:
    where = ("--coordinator", harness.address)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("of a project")
    pushed = light.run("push", tmp_path / "folder", *where, "--json")
    assert pushed.code == 0, pushed.err
    assert light.run("pull", pushed.json["digest"], tmp_path / "pulled", *where).code == 0
    assert (tmp_path / "pulled" / "a").read_text() == "of a project"
    assert light.run("verify", tmp_path / "pulled").code == 0
    assert not (light.home / "store").exists()


def test_without_templates_there_is_a_report_for_programs(light: LightInstall) -> None:
    script = "from slipway.results.report import main_file; print(main_file())"
    python = Path(light.program).with_name("python")
    done = subprocess.run(
        [python, "-P", "-c", script], env=light.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("('report.json', (")
    assert (
        "report.html and README.md were not written: they need jinja2; pip install 'slipway-ml[report]'" in done.stdout
    )


@pytest.mark.slow
def test_what_pip_installs_delivers_a_whole_export_through_a_coordinator(fresh: LightInstall, tmp_path: Path) -> None:
    """Everything but what is made of templates, and the answer says so; without a coordinator it says what to install."""
    assert_every_command_explains_itself(fresh)
    needs = fresh.run("export", "--checkpoint", "x")
    assert (needs.code, "'slipway-ml[all]'" in " ".join(needs.err.split())) == (6, True), needs.err
    base = tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(base, tmp_path / "run")
    address, home = f"127.0.0.1:{free_port()}", {"SLIPWAY_HOME": str(tmp_path / "server")}
    coordinator = [SLIPWAY, "coordinator", "--listen", address, "--state", str(tmp_path / "state.db")]
    worker = [SLIPWAY, "worker", "--coordinator", address, "--stage", "merge", "--drain-seconds", "0"]
    words = ("--base-model", base, "--checkpoint", tmp_path / "run", "--out", tmp_path / "out")
    only_merge = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")
    with (
        process(coordinator, tmp_path / "coordinator.log", **home),
        process(worker, tmp_path / "worker.log", **home),
        Client(address) as client,
    ):
        wait_for(lambda: _answers(client))
        done = fresh.run("export", *words, *only_merge, "--coordinator", address, "--json")
    assert done.code == 0, done.err
    folder = Path(done.json["output_directory"])
    assert Path(done.json["validation_report_path"]) == folder / "report.json"
    assert json.loads((folder / "report.json").read_text())["result"]["success"] is True
    assert any("pip install 'slipway-ml[report]'" in warning for warning in done.json["warnings"])
    assert not (folder / "report.html").exists()
    assert fresh.run("verify", folder).code == 0


def _answers(client: Client) -> bool:
    from slipway.errors import ModelExportError

    try:
        return list(client.list_exports()) == []
    except ModelExportError:
        return False
