"""The GitHub action of the examples: its form, and its script run as a runner runs it, with real exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.commands.cli import SLIPWAY
from support.models.tiny_models import make_base, make_checkpoint

ACTION = Path(__file__).parents[2] / "examples" / "github-action"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint(make_base(folder / "base"), folder / "tuned", step=5)
    return folder


def step(run: Path, folder: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """Run the script; return how it ended, the step's outputs and the job's page."""
    given = {
        "RUN": str(run / "tuned"),
        "BASE_MODEL": str(run / "base"),
        "FORMATS": "pytorch",
        "OUT": str(folder / "out"),
    }
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    path = os.pathsep.join([str(Path(SLIPWAY).parent), os.environ["PATH"]])
    home = {"SLIPWAY_HOME": str(folder / "home")}
    environment = {**os.environ, "PATH": path, **home, **files, **given, **inputs}
    done = subprocess.run([ACTION / "export.sh"], env=environment, capture_output=True, text=True, timeout=500)
    outputs, page = (Path(file).read_text() if Path(file).exists() else "" for file in files.values())
    return done, outputs, page


def test_its_form_is_that_of_an_action() -> None:
    check = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-actions", ACTION / "action.yml"]
    assert subprocess.run(check, capture_output=True).returncode == 0
    audit = [BIN / "zizmor", "--offline", "--no-progress", ACTION]
    assert subprocess.run(audit, capture_output=True).returncode == 0


def test_the_script_reads_every_input_of_the_action() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    given = action["runs"]["steps"][1]["env"]
    used = set(re.findall(r"\$\{?([A-Z_]+)", (ACTION / "export.sh").read_text()))
    assert {re.findall(r"inputs\.([a-z-]+)", value)[0] for value in given.values()} == set(action["inputs"]) - {
        "version"
    }
    assert set(given) <= used


@pytest.mark.slow
def test_a_job_exports_and_shows_what_it_made(run: Path, tmp_path: Path) -> None:
    settings = "validation.effort=quick\nvalidation.benchmark_performance=false\n"
    done, outputs, page = step(run, tmp_path, SETTINGS=settings)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in outputs.splitlines())
    assert found["passed"] == "true"
    assert (Path(found["directory"]) / "pytorch" / "model.safetensors").is_file()
    assert re.search(r"^\| pytorch \| passed \| [\d,]+ \| \d\.\de[-+]\d\d \|$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("inputs", "code", "said"),
    [
        ({"FORMATS": "gguf:q4_k_n"}, 3, "q4_k_n"),
        ({"RUN": "/nonexistent"}, 3, "/nonexistent"),
        ({"SETTINGS": "validation.efort=quick"}, 3, "validation.efort"),
    ],
)
def test_a_job_fails_with_the_words_of_the_command(
    run: Path, tmp_path: Path, inputs: dict[str, str], code: int, said: str
) -> None:
    done, outputs, page = step(run, tmp_path, **inputs)
    assert (done.returncode, outputs, page) == (code, "", "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
