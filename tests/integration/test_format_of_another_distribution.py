"""A distribution with one format, in one folder: nothing else has to know it, from the plan to the model card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from support.commands.cli import SLIPWAY, Done, slipway
from support.commands.distributions import install_format
from support.commands.usage_examples import usage_examples
from support.coordinators.harness import process, wait_for
from support.models import tiny_models
from support.servers.free_ports import free_port

SUPPORT = Path(__file__).parents[1] / "support"
PLUGIN = os.pathsep.join([str(SUPPORT / "npz_format"), os.environ.get("PYTHONPATH", "")])
ONLY = ("--set", "formats.pytorch.enabled=false", "--set", "formats.onnx.enabled=false")
QUICK = ("--set", "validation.test_samples=2", "--set", "validation.benchmark_performance=false")
ASKED = {"EXPORT_ENABLE_NPZ": "true", "EXPORT_NPZ_QUANTIZATION": "half", "EXPORT_SQUEEZE": "true"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def run(project: Path, *words: str | Path, home: str = "home", path: str = PLUGIN, **environment: str) -> Done:
    # Not in the checkout: what is installed there as metadata would be found before everything else.
    return slipway(*words, home=project / home, PYTHONPATH=path, **environment)


def export(project: Path, *more: str | Path, home: str = "home", **environment: str) -> Done:
    where = ("--base-model", project / "base", "--checkpoint", project / "run")
    return run(project, "export", "--json", *where, *ONLY, *more, home=home, **{**ASKED, **environment})


def test_the_plan_has_its_tasks_settings_sizes_and_cautions(project: Path) -> None:
    done = export(project, "--plan")
    assert done.code == 0, done.err
    tasks = {task["id"]: task for task in done.json["tasks"]}
    assert set(tasks) == {"merge", "npz_pack", "npz_pack-half", "reference", "validate"}
    assert tasks["merge"]["format"] == ""
    assert tasks["npz_pack-half"]["params"] == {"compress": True, "half": True}
    assert set(tasks["validate"]["inputs"]) == {"base", "adapter", "reference", "npz", "npz-half"}
    assert done.json["configuration"]["formats"]["npz"]["compress"] is True
    assert done.json["origins"]["formats.npz.compress"] == "EXPORT_SQUEEZE"
    assert done.json["origins"]["formats.npz.enabled"] == "EXPORT_ENABLE_NPZ"
    sizes = done.json["preflight"]["task_bytes"]
    assert 0 < sizes["npz_pack-half"] < sizes["npz_pack"]
    assert "formats.npz.compress: a compressed archive cannot be mapped" in done.json["warnings"]
    assert "stage: npz_pack" in {finding["check"] for finding in done.json["preflight"]["findings"]}


def test_its_settings_are_checked_as_others_are(project: Path) -> None:
    wrong = ("--set", "formats.npz.compres=true", "--set", "optimization.quantization=int8")
    done = export(project, *wrong, "--set", "formats.npz.leave_out=a,b", "--plan")
    assert done.code == 3
    assert "did you mean 'formats.npz.compress'?" in done.err + done.out
    assert "a, b cannot be left out" in done.err + done.out
    common = export(project, "--set", "optimization.quantization=int8", "--plan", EXPORT_NPZ_QUANTIZATION="")
    assert common.code == 3
    assert "int8 is not delivered as npz" in common.err + common.out
    without = run(project, "export", "--plan", "--set", "formats.npz.enabled=true", path=os.environ["PYTHONPATH"])
    assert without.code == 3
    assert "formats.npz.enabled" in without.err


@pytest.mark.slow
def test_its_outputs_are_delivered_judged_by_its_own_runtime_and_run_as_the_card_says(project: Path) -> None:
    done = export(project, *QUICK, "--out", project / "exported")
    assert done.code == 0, done.err[-3000:]
    exported = done.json
    assert set(exported["paths"]) == {"npz", "npz-half"}
    assert {entry["status"] for entry in exported["formats"].values()} == {"passed"}
    folder = Path(exported["output_directory"])
    report = json.loads((folder / "report.json").read_text())
    engines = {output["name"]: output["engine"] for output in report["validation"]["outputs"]}
    assert {engine["runtime"] for engine in engines.values()} == {"npz"}
    assert (engines["npz"]["stored_dtype"], engines["npz-half"]["stored_dtype"]) == ("float32", "float16")
    assert "npz-half" in (folder / "report.html").read_text()
    assert run(project, "verify", folder).code == 0
    digest = exported["formats"]["npz"]["digest"].removeprefix("sha256:")
    manifest = json.loads(next((project / "home" / "store").rglob(f"*{digest[2:]}*")).read_text())
    assert "application/vnd.numpy-archive" in {file["media_type"] for file in manifest["files"]}
    card = (folder / "README.md").read_text()
    assert "### npz\n" in card
    assert "pip install numpy" in card
    examples = usage_examples(card)
    assert set(examples) == {"npz", "npz-half"}
    for code in examples.values():
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        assert "weights" in done.stdout


@pytest.mark.slow
def test_its_level_alone_is_delivered_where_it_is_not_wanted_unquantized(project: Path) -> None:
    more = ("--set", "validation.enabled=false", "--set", "formats.npz.unquantized=false")
    done = export(project, *more, "--out", project / "level-alone")
    assert done.code == 0, done.err[-3000:]
    assert set(done.json["paths"]) == {"npz-half"}


def test_doctor_lists_it_with_what_it_needs(project: Path) -> None:
    found = {each["name"]: each for each in run(project, "doctor", "--json").json["formats"]}
    assert found["npz"]["available"]
    assert found["npz-<level>"]["available"]


def test_its_settings_are_completed(project: Path) -> None:
    shell = {
        "_SLIPWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": "slipway\nexport\n--set\nformats.npz",
        "COMP_CWORD": "3",
    }
    assert "formats.npz.compress=" in run(project, **shell).out.split()


@pytest.fixture
def coordinator(project: Path, tmp_path: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    environment = {"SLIPWAY_HOME": str(tmp_path), "PYTHONPATH": PLUGIN}
    serve = [SLIPWAY, "coordinator", "--listen", address, "--state", str(tmp_path / "state.db")]
    work = [
        SLIPWAY,
        "worker",
        "--coordinator",
        address,
        "--stage",
        "merge,npz_pack,reference,validate",
        "--drain-seconds",
        "0",
    ]

    def answers() -> bool:
        try:
            with Client(address) as client:
                return list(client.list_artifacts()) == []
        except ModelExportError:
            return False

    with (
        process(serve, tmp_path / "coordinator.log", **environment),
        process(work, tmp_path / "worker.log", **environment),
    ):
        wait_for(answers)
        yield address


@pytest.mark.slow
def test_an_export_of_it_goes_through_a_coordinator(project: Path, coordinator: str) -> None:
    done = export(project, *QUICK, "--coordinator", coordinator, "--out", project / "remote", home="client")
    assert done.code == 0, done.err[-3000:]
    assert set(done.json["paths"]) == {"npz", "npz-half"}
    assert {entry["status"] for entry in done.json["formats"].values()} == {"passed"}
    got = run(project, "get", done.json["export_id"], "--json", "--coordinator", coordinator, home="client").json
    own = got["configuration"]["formats"]["npz"]
    assert (own["enabled"], own["quantization"], own["settings"]["compress"]) == (True, {"levels": ["half"]}, True)


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """An import path with a format whose module cannot be imported."""
    site = tmp_path / "site"
    code = "import a_library_that_is_not_there\n"
    install_format(site, "broken-format", name="ggjt", module="broken_format", code=code)
    return os.pathsep.join([str(site), os.environ["PYTHONPATH"]])


FAULT = "the installed format 'ggjt' of broken-format cannot be used: ModuleNotFoundError: No module named 'a_library"


@pytest.mark.slow
def test_a_format_that_cannot_be_imported_stops_no_other_command(project: Path, tmp_path: Path, broken: str) -> None:
    pushed = run(project, "push", project / "base", "--json", path=broken)
    assert pushed.code == 0, pushed.err
    pulled = run(project, "pull", pushed.json["digest"], tmp_path / "pulled", path=broken)
    assert pulled.code == 0, pulled.err
    for words in (
        ["verify", tmp_path / "pulled"],
        ["cache", "ls"],
        ["get"],
        ["list"],
        ["checkpoints", project / "run"],
    ):
        done = run(project, *words, path=broken)
        assert "FORMAT_INVALID" not in done.out + done.err
        assert "Traceback" not in done.err
        assert done.code == (2 if words == ["get"] else 0), done.err
    health = {each["name"]: each for each in run(project, "doctor", "--json", path=broken).json["formats"]}
    assert FAULT in health["ggjt"]["detail"]
    assert not health["ggjt"]["available"]
    assert health["pytorch"]["available"]


def test_a_format_that_cannot_be_imported_is_a_warning_and_refused_by_name(project: Path, broken: str) -> None:
    where = ("--base-model", project / "base", "--checkpoint", project / "run", "--plan", "--json")
    planned = run(project, "export", *where, path=broken)
    assert planned.code == 0, planned.err
    assert any(FAULT in warning for warning in planned.json["warnings"])
    assert {task["id"] for task in planned.json["tasks"]} >= {"merge", "onnx_export"}
    for done in (
        run(project, "export", *where, path=broken, EXPORT_ENABLE_GGJT="true"),
        run(project, "export", *where, "--set", "formats.ggjt.enabled=true", path=broken),
    ):
        assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID"), done.err
        assert FAULT in done.json["error_message"]
        assert "install a version of broken-format that fits" in done.json["error_message"]
        assert "Traceback" not in done.err
