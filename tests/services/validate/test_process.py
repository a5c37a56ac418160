"""Runner processes: crashes are typed, cancellation and the stage's death end them, a time limit holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from slipway.errors import ModelExportError
from slipway.proof.runtime import Samples
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, ValidationReport
from slipway_validate.params import ValidateParams
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Benchmark, RunSpec, Spec
from slipway_validate.speed import Stopwatch
from slipway_validate.stage import STAGE
from support.coordinators.harness import wait_for
from support.models.validation_models import Models

PARAMS = ValidateParams(sequence_length=48, test_samples=2, compare_outputs=False, benchmark_decode_steps=4096)

TRANSFORMERS = "slipway.proof.transformers_runtime:load"


def runner_of(process: psutil.Process, workdir: Path) -> psutil.Process | None:
    """The runner below a process that runs the PyTorch output of a stage in this folder."""
    for child in process.children(recursive=True):
        try:
            folder = Path(child.cmdline()[-1])
            if folder.is_relative_to(workdir) and folder.match("outputs/pytorch"):
                return child
        except (psutil.Error, IndexError):
            continue
    return None


def pid_of(context: Context) -> int:
    """The one runner of a work folder."""
    runners = [child for child in psutil.Process().children() if child.cmdline()[-1] == str(context.workdir / "run")]
    assert len(runners) == 1
    return runners[0].pid


class Running:
    """The stage in a thread, and how it ended."""

    def __init__(self, inputs: dict[str, Path], workdir: Path) -> None:
        self.ctx = Context(workdir=workdir)
        self.error: ModelExportError | None = None
        self.report: ValidationReport | None = None
        self._thread = threading.Thread(target=self._run, args=(inputs,))
        self._thread.start()

    def _run(self, inputs: dict[str, Path]) -> None:
        try:
            self.report = ValidationReport.read(STAGE.run(inputs, PARAMS, self.ctx)["validation"])
        except ModelExportError as error:
            self.error = error

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()


@pytest.fixture
def inputs(tiny: Models, held_out: Path) -> dict[str, Path]:
    return {"base": tiny.base, "adapter": tiny.adapter, "heldout": held_out, "pytorch": tiny.merged}


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "STAGE_KILLED"), pytest.param(signal.SIGSEGV, "STAGE_CRASHED", marks=pytest.mark.slow)],
)
def test_a_crash_is_that_outputs_failure(
    inputs: dict[str, Path], tiny_onnx: Path, context: Context, number: signal.Signals, reason: str
) -> None:
    beside = {} if number == signal.SIGKILL else {"onnx": tiny_onnx}
    running = Running({**inputs, **beside}, context.workdir)
    runner = wait_for(lambda: runner_of(psutil.Process(), context.workdir))
    assert isinstance(runner, psutil.Process)
    runner.send_signal(number)
    running.join(240)
    assert running.report is not None
    broken = running.report.output("pytorch")
    assert broken.status is OutputStatus.FAILED
    assert broken.status_reason == reason
    assert broken.explanation
    assert broken.remedy
    assert all(running.report.output(name).passed for name in beside)  # the next output is not touched by it
    assert not running.report.passed


@pytest.mark.slow
def test_an_output_that_is_killed_beside_another_process_is_run_again_alone(
    inputs: dict[str, Path], tiny_onnx: Path, context: Context
) -> None:
    running = Running({**inputs, "onnx": tiny_onnx}, context.workdir)
    runner = wait_for(lambda: runner_of(psutil.Process(), context.workdir))
    assert isinstance(runner, psutil.Process)
    runner.send_signal(signal.SIGKILL)
    running.join(240)
    assert running.report is not None
    assert running.report.output("pytorch").passed
    assert running.report.output("onnx").passed  # its process was started ahead, and is started anew


def test_cancellation_ends_the_runner(inputs: dict[str, Path], context: Context) -> None:
    running = Running(inputs, context.workdir)
    runner = wait_for(lambda: runner_of(psutil.Process(), context.workdir))
    assert isinstance(runner, psutil.Process)
    wait_for(
        lambda: psutil.Process(runner.pid).memory_info().rss > 100 << 20
    )  # torch is being imported: it is on guard
    runner.send_signal(signal.SIGINT)  # as a terminal does at Ctrl-C: only the stage decides
    time.sleep(0.3)
    assert runner.is_running()
    running.ctx.cancelled.set()
    running.join(240)
    assert running.error is not None
    assert running.error.reason == "CANCELLED"
    assert not runner.is_running()
    assert not any(context.workdir.iterdir())


@pytest.mark.slow
class TestWhileBeingTimed:
    """A process that waits with its result can end, or be ended, in any round; the result stands and nothing is left."""

    SPEC: ClassVar[dict[str, Any]] = {"runtime": TRANSFORMERS, "prompts": ((1, 2, 3),), "new_tokens": 2}

    @pytest.fixture
    def spec(self, tiny: Models, tmp_path: Path) -> Spec:
        samples = tmp_path / "samples"
        Samples(np.arange(32, dtype=np.int64).reshape(2, 16) % 20).write(samples)
        benchmark = Benchmark(prefill_tokens=16, decode_steps=4)
        return Spec(run=RunSpec(model=tiny.merged, samples=samples, benchmark=benchmark, **self.SPEC))

    @contextmanager
    def waiting(self, spec: Spec, context: Context, *, timeout_seconds: float = 240.0) -> Iterator[process.Runner]:
        before = set(psutil.Process().children(recursive=True))
        folder = context.workdir / "run"
        with process.start_runner(spec, folder, context, label="x", timeout_seconds=timeout_seconds) as runner:
            yield runner
        assert set(psutil.Process().children(recursive=True)) <= before, "nothing is left of it"

    def test_rounds_are_taken_on_demand_and_it_sleeps_between_them(self, spec: Spec, context: Context) -> None:
        with self.waiting(spec, context) as runner:
            assert runner.result.status == "done"
            assert runner.alive
            taken = [runner.time_round() for _ in range(2)]
            assert [len(each.decode_seconds) for each in taken] == [4, 4]
            used = runner.cpu_seconds()
            time.sleep(1)
            assert runner.cpu_seconds() - used < 0.2

    def test_a_held_one_imports_and_waits(self, spec: Spec, context: Context) -> None:
        assert spec.run is not None
        held = Spec(run=spec.run.model_copy(update={"held": True}))
        with self.waiting(held, context) as runner:
            runner.wait_for_imports()
            time.sleep(0.5)
            used = runner.cpu_seconds()
            time.sleep(1)
            assert runner.cpu_seconds() - used < 0.2
            assert not (context.workdir / "run" / "result.json").is_file()
            runner.begin()
            assert runner.result.status == "done"
            assert runner.time_round().prefill_seconds

    def test_a_held_one_that_dies_has_a_reason(self, spec: Spec, context: Context) -> None:
        assert spec.run is not None
        held = Spec(run=spec.run.model_copy(update={"held": True}))
        with self.waiting(held, context) as runner:
            os.kill(pid_of(context), signal.SIGKILL)
            runner.wait_for_imports()
            runner.begin()
            assert (runner.result.status, runner.result.reason) == ("failed", "STAGE_KILLED")

    def test_a_crash_leaves_the_output_its_comparison(self, spec: Spec, context: Context) -> None:
        with self.waiting(spec, context) as runner:
            first = runner.time_round()
            os.kill(pid_of(context), signal.SIGKILL)
            speed, note = Stopwatch(None, ValidateParams(), context).time(runner)
            assert speed is None
            assert "process of" in note
            assert first.prefill_seconds
            assert runner.result.continuations

    def test_a_round_that_hangs_is_ended(self, spec: Spec, context: Context) -> None:
        with self.waiting(spec, context) as runner:
            assert runner.result.status == "done"
            os.kill(pid_of(context), signal.SIGSTOP)
            runner.timeout_seconds = 0.5
            with pytest.raises(process.RunnerEnded, match=r"within 0\.5 s"):
                runner.time_round()
            assert not runner.alive

    def test_a_round_of_one_that_never_had_a_result_is_refused(self, spec: Spec, context: Context) -> None:
        with self.waiting(spec, context, timeout_seconds=0.05) as runner, pytest.raises(process.RunnerEnded):
            runner.time_round()
        assert runner.result.reason == "STAGE_TIMEOUT"

    def test_cancellation_ends_a_round(self, spec: Spec, context: Context) -> None:
        with self.waiting(spec, context) as runner:
            assert runner.result.status == "done"
            context.cancelled.set()
            with pytest.raises(ModelExportError) as caught:
                runner.time_round()
        assert caught.value.reason == "CANCELLED"
        assert not runner.alive


def test_the_runner_ends_with_the_stage(inputs: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / "killed"
    work.mkdir()
    program = (
        "import sys, pathlib; from slipway.stage import Context; from slipway_validate.stage import *;"
        "paths = dict(zip(['base', 'adapter', 'heldout', 'pytorch'], map(pathlib.Path, sys.argv[2:])));"
        "STAGE.run(paths, ValidateParams(compare_outputs=False, benchmark_decode_steps=4096, sequence_length=48),"
        " Context(workdir=pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(work), *map(str, inputs.values())]
    stage = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        runner = wait_for(lambda: runner_of(psutil.Process(stage.pid), work))
        assert isinstance(runner, psutil.Process)
    finally:
        os.kill(stage.pid, signal.SIGKILL)
        stage.wait()
    wait_for(lambda: not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE)


def test_what_native_code_prints_never_reaches_the_pipe(tmp_path: Path) -> None:
    program = (
        "import os, sys; from slipway_validate.runner import main as runner\n"
        "def execute(spec, folder, commands):\n"
        "    os.write(1, b'native \\xff without an end')\n"
        "    runner._report('windows', 1, 2)\n"
        "    return runner.RunResult(), None\n"
        "runner.execute = execute; sys.argv = ['runner', sys.argv[1]]; runner.main()"
    )
    spec = Spec(run=RunSpec(runtime=TRANSFORMERS, model=tmp_path, samples=tmp_path / "none"))
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as runner:  # the end of its input would end it
        said, printed = runner.stdout.read(), runner.stderr.read()
    assert json.loads(said) == {"phase": "windows", "done": 1, "total": 2}
    assert b"native" in printed
