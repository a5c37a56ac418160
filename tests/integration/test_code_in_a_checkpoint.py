"""No process of Slipway runs code that lies in a checkpoint, also where the checkpoint is the current folder."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.execution.execution import Execution
from slipway.execution.supervisor import execute
from slipway.stage_call import StageCall
from support.commands.cli import SLIPWAY, environment
from support.coordinators.harness import process, wait_for
from support.hostile.traps import Traps
from support.models import tiny_models
from support.servers.free_ports import free_port

ONLY_PYTORCH = ("--set", "formats.onnx.enabled=false")
VALIDATED = ["validation.test_samples=1", "validation.benchmark_performance=false"]


class Checkpoint:
    """A checkpoint full of traps, with its base beside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.base, self.home = root, root / "base", root / "home"
        tiny_models.make_base(self.base)
        tiny_models.make_checkpoint(self.base, root / "run")
        self.folder = root / "run" / "checkpoint-10"
        self.traps = Traps(self.folder, root / "ran")

    def slipway(self, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the command inside the checkpoint."""
        command = [SLIPWAY, *map(str, words)]
        around = environment(self.home, **more)
        return subprocess.run(command, cwd=self.folder, env=around, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("trapped"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["validation.enabled=false"], VALIDATED],
    ids=["merged", "validated"],
)
def test_an_export_of_the_current_folder(checkpoint: Checkpoint, tmp_path: Path, settings: list[str]) -> None:
    """Also the runner of a validation, which is a process of the stage's."""
    where = ("--checkpoint", ".", "--base-model", checkpoint.base, "--out", tmp_path / "out")
    more = [word for setting in settings for word in ("--set", setting)]
    done = checkpoint.slipway("export", "--json", *where, *ONLY_PYTORCH, *more)
    assert checkpoint.traps.ran() == []
    found = json.loads(done.stdout)
    assert found["paths"]["pytorch"], done.stderr
    if settings == VALIDATED:
        assert found["formats"]["pytorch"]["status"] in {"passed", "failed"}  # it was loaded, and run
    assert list((tmp_path / "out").rglob("*.py")) == []


@pytest.mark.slow
def test_one_stage_and_what_looks_at_the_current_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    inputs = ("--input", f"base={checkpoint.base}", "--input", "adapter=.")
    for words in (
        ("stage", "merge", *inputs, "--param", "verify=spot", "--out", tmp_path / "out"),
        ("checkpoints", "."),
    ):
        done = checkpoint.slipway(*words)
        assert (done.returncode, checkpoint.traps.ran()) == (0, []), done.stderr


@pytest.mark.slow
def test_services(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A coordinator and a worker started there, and a stage of that worker."""
    address, home = f"127.0.0.1:{free_port()}", tmp_path / "home"
    here = shutil.copytree(checkpoint.folder, tmp_path / "here")  # the log of a process goes where it runs
    words = {
        "coordinator": ("--listen", address, "--state", str(tmp_path / "state.db")),
        "worker": ("--coordinator", address, "--stage", "merge", "--drain-seconds", "0"),
    }
    with ExitStack() as stack:
        for name, arguments in words.items():
            command = [SLIPWAY, name, *arguments]
            stack.enter_context(process(command, here / f"{name}.log", SLIPWAY_HOME=str(home)))
        wait_for(lambda: answers(address), seconds=60)
        where = ("--checkpoint", ".", "--base-model", checkpoint.base, "--out", tmp_path / "out")
        more = ("--set", "validation.enabled=false", "--coordinator", address, "--json")
        done = checkpoint.slipway("export", *where, *ONLY_PYTORCH, *more)
    assert (done.returncode, checkpoint.traps.ran()) == (0, []), done.stdout + done.stderr


def answers(address: str) -> bool:
    with Client(address) as client:
        try:
            list(client.list_exports())
        except ModelExportError:
            return False
    return True


def test_an_empty_part_of_the_python_path_is_not_the_current_folder(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``PYTHONPATH=$PYTHONPATH:/opt/stages`` leaves one, where there was none."""
    around = environment(checkpoint.home)
    monkeypatch.setenv("PYTHONPATH", ":" + around["PYTHONPATH"])
    monkeypatch.chdir(checkpoint.folder)
    execution = Execution(StageCall("support.stages.plain:SOURCE", {}, {}), tmp_path)
    outcome = asyncio.run(execute(execution))
    assert (outcome.failure, checkpoint.traps.ran()) == (None, [])


def test_the_traps_work(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    trapped.mkdir()
    traps = Traps(trapped, tmp_path / "ran")
    command = [SLIPWAY.removesuffix("slipway") + "python", "-m", "slipway.execution.child_main", "1"]
    subprocess.run(command, cwd=trapped, env=environment(checkpoint.home), capture_output=True)
    assert traps.ran()
